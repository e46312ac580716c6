"""Log-probs and entropies from the token head, in chunks of positions if the logits are large.

Every role with a token head calls `token_columns`. If the logits of a pass are larger than
`CHUNK_BYTES` (on a GPU, also more than `ROWS_ON_GPU` positions), the head runs over one chunk of
positions at a time, in the forward pass and again in the backward pass, which accumulates the
gradients of the chunks. Only the hidden states and the gradient of the head's weights are in memory
for all positions.

A chunk goes through the model's own `forward`, with its hidden states instead of the body. The
model's own code therefore computes a bias, a scale, soft-capping, tied embeddings or an adapter at
the head. The logits of a class for which this is not known to be right are not chunked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from verl_like.errors import ConfigError
from verl_like.tensor_ops import (
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
    sum_pi_squared_from_logits,
)
from workers.models.attention import warn_once
from workers.models.causal_lm import body_of, replaced_forward
from workers.models.state import local_shard
from workers.models.support import Support
from workers.training.microbatch import Columns
from workers.training.passes.packing import Feed, model_inputs, read, select_reads

if TYPE_CHECKING:
    from workers.parallel.vocabulary import VocabShard

CHUNK_BYTES = 256 * 2**20
"""Largest chunk of float32 logits, in bytes; on a GPU, `ROWS_ON_GPU` positions may be larger."""
ROWS_ON_GPU = 1024
"""Minimum rows per chunk on a GPU: with fewer, reading the head's weight takes most of the time."""
GRADIENT_ROWS = 16384
"""Rows that are added at a time to the gradient of a weight that is not float32."""


class TokenOutputs(NamedTuple):
    """The temperature, and the outputs per response token in addition to log-probs."""

    temperature: float = 1.0
    entropy: bool = False
    sum_pi_squared: bool = False
    top_k: int = 0
    """Number of likeliest tokens, in the columns `top_tokens_N` and `top_log_probs_N`."""


DEFAULT = TokenOutputs()


def token_columns(
    module: Any,
    feed: Feed,
    labels: Tensor,
    token_outputs: TokenOutputs,
    *,
    may_chunk: bool = True,
    vocab: VocabShard | None = None,
    fused: bool = False,
) -> Columns:
    """Return `log_probs` of the labels, and the other `token_outputs`, at the positions of `feed`.

    `vocab` is this rank's shard of the vocabulary if it is split over ranks. With `fused`,
    log-probs and entropy are computed by compiled functions; this has no effect with `vocab`.
    """
    compute = functools.partial(
        columns_of_logits, token_outputs=token_outputs, vocab=vocab, fused=fused
    )
    num_words = None if vocab is None else vocab.most
    num_rows = positions_per_chunk(
        module.config, len(labels), may_chunk, num_words, labels.device.type
    )
    if num_rows < len(labels):
        return in_chunks(module, feed, labels, compute, num_rows)
    return compute(read(module, feed), labels)


def columns_of_logits(
    logits: Tensor,
    labels: Tensor,
    token_outputs: TokenOutputs,
    vocab: VocabShard | None = None,
    fused: bool = False,
) -> Columns:
    """Return the requested columns of logits; the backward pass writes over `logits`."""
    if vocab is not None:
        if token_outputs.top_k:
            raise ConfigError(
                "the likeliest tokens are not supported if the vocabulary is split over ranks "
                "(parallel.tp)."
            )
        from workers.parallel.vocabulary import token_stats

        return token_stats(logits, labels, vocab, *token_outputs[:3])
    columns: Columns = {}
    temperature = token_outputs.temperature
    options: Any = {"temperature": temperature, "inplace_backward": True, "fused": fused}
    if token_outputs.entropy:
        both = logprobs_and_entropy_from_logits(logits, labels, **options)
        columns["log_probs"], columns["entropys"] = both
    else:
        columns["log_probs"] = logprobs_from_logits(logits, labels, **options)
    if token_outputs.sum_pi_squared:
        squares = sum_pi_squared_from_logits(logits, temperature=token_outputs.temperature)
        columns["sum_pi_squared"] = squares
    if token_outputs.top_k:
        scaled = logits.float() / token_outputs.temperature
        values, tokens = (scaled - scaled.logsumexp(dim=-1, keepdim=True)).topk(token_outputs.top_k)
        for rank in range(token_outputs.top_k):
            columns[f"top_tokens_{rank}"] = tokens[:, rank]
            columns[f"top_log_probs_{rank}"] = values[:, rank]
    return columns


def positions_per_chunk(
    config: Any,
    num_positions: int,
    may_chunk: bool = True,
    num_words: int | None = None,
    device_type: str = "cpu",
) -> int:
    """Return the number of positions whose logits exist at the same time in a pass.

    If the vocabulary is split over ranks, `num_words` is the largest number of entries on one rank.
    """
    num_rows = rows_per_chunk(config, num_words, device_type)
    if may_chunk and num_positions > num_rows and not chunking_blocker(config):
        return num_rows
    return num_positions


def rows_per_chunk(config: Any, num_words: int | None = None, device_type: str = "cpu") -> int:
    """Return how many positions fit in CHUNK_BYTES of logits; at least ROWS_ON_GPU on GPUs."""
    vocabulary: int = num_words or config.get_text_config().vocab_size
    return max(ROWS_ON_GPU if device_type == "cuda" else 1, CHUNK_BYTES // (4 * vocabulary))


def in_chunks(
    module: Any, feed: Feed, labels: Tensor, compute: Callable[..., Columns], num_rows: int
) -> Columns:
    """Run chunks in one call of the module, so that FSDP's hooks see an ordinary pass."""
    model_forward = module.forward
    names: list[str] = []

    def forward(**inputs: Any) -> tuple[Tensor, ...]:
        head = _Head(module, model_forward, inputs)
        states = select_reads(head.run_body(), feed)
        columns: Any = _Chunks.apply(head, compute, names, labels, num_rows, states, *head.weights)  # type: ignore[no-untyped-call]
        return tuple(columns)

    with replaced_forward(module, forward):
        results = module(**model_inputs(module, feed))
    return dict(zip(names, results, strict=True))


class _Head:
    """The computation of a model after its body, as a function of hidden states."""

    def __init__(self, module: Any, forward: Callable[..., Any], inputs: dict[str, Any]) -> None:
        self.forward, self.inputs = forward, inputs
        self.body, self.layer = body_of(module), module.get_output_embeddings()
        self.make_output: Callable[..., Any] | None = None

        of_layer = dict(self.layer.named_parameters())
        outside = {id(weight): weight for weight in of_layer.values()}
        inside = {id(weight) for weight in self.body.parameters()}
        for weight in module.parameters():
            if id(weight) not in inside:
                outside[id(weight)] = weight
        self.weights = [weight for weight in outside.values() if weight.requires_grad]
        """Trained weights of the output layer (even tied ones), then others outside the body."""
        self.linear_names: list[str] = []
        """Names of the output layer's trained weights, if it is a plain linear layer."""
        if type(self.layer) is nn.Linear:
            self.linear_names = [name for name, weight in of_layer.items() if weight.requires_grad]

    def run_body(self) -> Tensor:
        """Return the body's hidden states [rows, width, size]."""
        outputs: list[Any] = []
        body_forward = self.body.forward

        def recorded(*args: Any, **kwargs: Any) -> Any:
            outputs.append(body_forward(*args, **kwargs))
            return outputs[-1]

        with replaced_forward(self.body, recorded):
            self.forward(**self.inputs, logits_to_keep=1)  # logits of one position, unused
        if not outputs:
            raise ValueError("its forward pass does not call its base model")
        self.make_output = type(outputs[0])
        states: Tensor = outputs[0].last_hidden_state
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [positions, vocabulary] of states [positions, size]."""
        assert self.make_output is not None, "the body runs first"
        output = self.make_output(last_hidden_state=states[None])
        with replaced_forward(self.body, lambda *_, **__: output):
            logits: Tensor = self.forward(**self.inputs).logits.squeeze(0)  # as in `read`
        return logits


class _Chunks(torch.autograd.Function):
    """Run `compute(logits, labels)` in chunks of positions, without one graph of all chunks.

    `names` receives the names of the returned columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: _Head,
        compute: Callable[[Tensor, Tensor], Columns],
        names: list[str],
        labels: Tensor,
        num_rows: int,
        states: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        # One column for all chunks: small tensors that outlive the logits of a chunk would fragment
        # the memory that the next chunk needs, and the process would grow by one chunk each time.
        columns: list[Tensor] = []
        for start in range(0, len(states), num_rows):
            chunk = slice(start, start + num_rows)
            results = compute(head.logits(states[chunk]), labels[chunk])
            columns = columns or [part.new_empty(len(states)) for part in results.values()]
            for column, part in zip(columns, results.values(), strict=True):
                column[chunk] = part
            names[:] = results

        ctx.save_for_backward(states, labels, *weights)
        ctx.head, ctx.compute, ctx.num_rows = head, compute, num_rows
        ctx.set_materialize_grads(False)
        return tuple(columns)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        states, labels, *weights = ctx.saved_tensors
        wide = [torch.promote_types(weight.dtype, torch.float32) for weight in weights]
        sums = [torch.zeros_like(w, dtype=dtype) for w, dtype in zip(weights, wide, strict=True)]
        names = ctx.head.linear_names
        others, other_sums = weights[len(names) :], sums[len(names) :]
        grad_states = torch.empty_like(states)

        for start in range(0, len(states), ctx.num_rows):
            chunk = slice(start, start + ctx.num_rows)
            states_here = states[chunk].detach().requires_grad_()
            linear_sums = dict(zip(names, map(local_shard, sums), strict=False))
            with torch.enable_grad(), _accumulate_into(ctx.head.layer, linear_sums):
                outputs = [*ctx.compute(ctx.head.logits(states_here), labels[chunk]).values()]
            used = [number for number, grad in enumerate(grads) if grad is not None]
            grad_chunk, *of_others = torch.autograd.grad(
                [outputs[number] for number in used],
                [states_here, *others],
                [grad[chunk] for grad in grads if grad is not None],
            )
            grad_states[chunk] = grad_chunk
            for total, grad in zip(other_sums, of_others, strict=True):
                total += grad

        results = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]
        return None, None, None, None, None, grad_states, *results


class _AccumulatingLinear(torch.autograd.Function):
    """A linear layer that adds the gradients of its weights to sums that the caller owns.

    If it returned the gradients instead, every chunk would need the same memory again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        multiply: Callable[[Tensor], Tensor],
        sums: dict[str, Tensor],
    ) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.sums = sums
        return multiply(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        states, weight = ctx.saved_tensors
        flat, grad_flat = states.flatten(0, -2), grad.flatten(0, -2)
        if "weight" in ctx.sums:
            total = ctx.sums["weight"]
            if total.dtype == grad.dtype:
                total.addmm_(grad_flat.t(), flat)
            else:
                rows = grad_flat.split(GRADIENT_ROWS, dim=1)
                for total_rows, grad_rows in zip(total.split(GRADIENT_ROWS), rows, strict=True):
                    total_rows += grad_rows.t() @ flat
        if "bias" in ctx.sums:
            ctx.sums["bias"] += grad_flat.sum(dim=0, dtype=ctx.sums["bias"].dtype)
        return grad @ weight, None, None, None


@contextmanager
def _accumulate_into(layer: Any, sums: dict[str, Tensor]) -> Iterator[None]:
    """Context in which the gradients of this layer's weights are added to `sums`, if any."""
    if not sums:
        yield
        return

    weight, multiply = local_shard(layer.weight), layer.forward

    def forward(states: Tensor) -> Tensor:
        result: Tensor = _AccumulatingLinear.apply(states, weight, multiply, sums)  # type: ignore[no-untyped-call]
        return result

    with replaced_forward(layer, forward):
        yield


def chunking_blocker(config: Any) -> str:
    """Return why the head of models with this config does not run in chunks; "" if it does."""
    support = Support.of(config, "eager")
    reason = support.why_not("head")
    if reason and support.capabilities is not None:
        warn_once(
            f"model type {config.model_type} does not compute its head in chunks "
            f"({reason}): all logits of a pass are stored at once, 4 bytes per position "
            "and vocabulary entry. Smaller passes need less memory."
        )
    return reason
