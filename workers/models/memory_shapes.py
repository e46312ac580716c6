"""Memory that a model takes, from its shapes: counted on the meta device, where nothing is held.

    shapes = model_shapes(path, head="token", compute=torch.bfloat16)
    shapes.num_weights                            # exact
    shapes.saved(num_tokens=8192, num_reads=4096) # bytes a backward pass keeps

Activations are the tensors that autograd saves in a forward pass of the model itself, so every
architecture has its own. Attention counts as a fused kernel: queries, keys, values, output and one
number a token and head, never the square of the length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from workers.models.attention import attending_by
from workers.models.causal_lm import Head, body_of, empty_model
from workers.models.folder import model_folder
from workers.models.lora import add_adapter
from workers.models.quantize import quantizable
from workers.parallel.experts import experts_of
from workers.parallel.pipeline import most_waiting, num_chunks
from workers.parallel.stages import Stages, stage_ranges

if TYPE_CHECKING:
    from workers.config import ModelConfig

COUNTED = "counted_attention"
"""Name of `_attention` in transformers' interface."""


@dataclass(frozen=True)
class ModelShapes:
    """Counts of a model's numbers: of its weights, and of what a pass over tokens keeps.

    They are those of one rank where matrices are cut, or layers are on several ranks.
    """

    num_weights: int
    num_trained: int
    num_int8: int
    """Weights of linear layers, which quantisation makes int8."""
    num_scales: int
    """Numbers in float32 that they then have beside them."""
    num_layers: int
    num_outside_layers: int
    """Weights of embeddings, last norm and head: whole throughout a pass of FSDP."""
    num_in_experts: int
    """Weights of routed experts, that ranks can share."""
    hidden_size: int
    outputs_per_read: int
    """Numbers of the head's output at one position: the vocabulary's size, or one."""
    key_value_numbers: int
    """Numbers that a KV cache holds for one token."""
    saved_per_token: int | None
    """Bytes that autograd saves for a token of the body; None where the model cannot be traced."""
    compute_bytes: int
    shared_per_token: int = 0
    """Bytes of these that other ranks of tp keep, but under checkpointing."""
    num_waiting: int = 1
    """Forward passes whose backward passes come later."""

    def held(self, dtype: torch.dtype, quantization: str | None = None) -> int:
        """Bytes of the weights in this type, or as they are quantised."""
        if not quantization:
            return self.num_weights * dtype.itemsize
        return (self.num_weights - self.num_int8) * dtype.itemsize + (
            self.num_int8 + 4 * self.num_scales
        )

    def saved(self, num_tokens: int, num_reads: int, checkpointing: bool) -> int | None:
        """Bytes at the peak of a forward and backward pass, logits in float32 included."""
        if self.saved_per_token is None:
            return None
        per_token = (self.saved_per_token - self.shared_per_token) * self.num_waiting
        if checkpointing:  # the inputs of every layer, and one layer computed again
            inputs = self.num_layers * self.hidden_size * self.compute_bytes
            per_token = self.saved_per_token // self.num_layers + inputs * self.num_waiting
        return num_tokens * per_token + self.logits(num_reads)

    def logits(self, num_reads: int) -> int:
        """Bytes of the head's output; its gradient is written over it."""
        return 4 * num_reads * self.outputs_per_read

    def beside_chunks(self, num_reads: int, trains: bool) -> int:
        """Bytes that a head in chunks takes beside a chunk's logits (`workers.training.lm_head`).

        Hidden states of what is read and, where it `trains`, their gradient and the weight's.
        """
        states = num_reads * self.hidden_size * self.compute_bytes
        if not trains:
            return states
        return 2 * states + 4 * self.hidden_size * self.outputs_per_read


_known: dict[tuple[Any, ...], ModelShapes] = {}
"""Settings, what config.json says, head, type of computation and place -> their shapes.

Roles of one run have mostly the same ones, and a pass to count with takes half a second.
"""


@dataclass(frozen=True)
class StageOf:
    """Where a rank is among those that share the layers."""

    rank: int
    num_ranks: int
    schedule: str
    ep: int = 1


def described_by(config: ModelConfig) -> str:
    """The text of the model's config.json, or none."""
    file = model_folder(config.path, weights=False) / "config.json"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def model_shapes(
    config: ModelConfig,
    head: Head,
    compute: torch.dtype,
    tp: int = 1,
    stage: StageOf | None = None,
) -> ModelShapes:
    """The shapes of the model that `config.path` describes, computing in that type.

    Or of a rank's part of it, of `tp` that matrices are cut over, or of its layers.
    """
    config = replace(config, enable_gradient_checkpointing=False)  # which shapes do not depend on
    known = (repr(config), described_by(config), head, compute, tp, stage)
    if known not in _known:
        if stage is None:
            _known[known] = _counted(config, meta_model(config, head), head, compute, tp)
        else:
            for own, shapes in _of_stages(config, head, compute, tp, stage):
                _known[(*known[:-1], own)] = shapes
    return _known[known]


def _of_stages(
    config: ModelConfig, head: Head, compute: torch.dtype, tp: int, asked: StageOf
) -> Iterator[tuple[StageOf, ModelShapes]]:
    """Of every rank that shares the layers with the one asked for."""
    whole = model_shapes(config, head, compute, tp)
    module = meta_model(config, head)
    num_stages = asked.num_ranks * num_chunks(asked.schedule)
    ranges = stage_ranges(module, num_stages, asked.ep)
    stages = Stages(module, ranges)
    for rank in range(asked.num_ranks):
        own = range(rank, num_stages, asked.num_ranks)
        num_layers = sum(len(ranges[number]) for number in own)
        is_last = rank == asked.num_ranks - 1
        yield (
            replace(asked, rank=rank),
            replace(
                _counted(config, module, head, compute, tp, stages.weights(own)),
                num_layers=num_layers,
                outputs_per_read=whole.outputs_per_read if is_last else 0,
                saved_per_token=whole.saved_per_token
                and whole.saved_per_token * num_layers // whole.num_layers,
                shared_per_token=whole.shared_per_token * num_layers // whole.num_layers,
                num_waiting=most_waiting(asked.schedule, rank, asked.num_ranks),
            ),
        )


def _counted(
    config: ModelConfig,
    module: Any,
    head: Head,
    compute: torch.dtype,
    tp: int,
    own: set[int] | None = None,
) -> ModelShapes:
    """`own` are the ids of those weights that a rank has, of all layers."""
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    body, text = body_of(module), module.config.get_text_config()
    layers = set(module._no_split_modules or ())
    inside: dict[int, Tensor] = {}
    for child in module.modules():
        if type(child).__name__ in layers:
            inside |= {id(weight): weight for weight in child.parameters()}

    cut: set[int] = set()
    if tp > 1:
        from workers.parallel import tensor  # with torch's DTensor

        tensor.check(module, tp, "parallel.tp")
        cut = tensor.cut_weights(module)

    def numel(weights: Iterable[Tensor]) -> int:
        here = (w for w in weights if own is None or id(w) in own)
        return sum(-(-w.numel() // tp) if id(w) in cut else w.numel() for w in here)

    saved, shared = None, 0
    if own is None:
        saved, shared = saved_per_token(config, body, compute, tp)
    num_weights = numel(module.parameters())
    linears = [layer.weight for _, layer in quantizable(module)]
    return ModelShapes(
        num_weights=num_weights,
        num_trained=numel(trained),
        num_int8=sum(weight.numel() for weight in linears),
        num_scales=sum(len(weight) for weight in linears),
        num_layers=text.num_hidden_layers,
        num_outside_layers=num_weights - numel(inside.values()),
        num_in_experts=sum(
            weight.numel()
            for _, each in experts_of(module)
            for weight in each.parameters()
            if own is None or id(weight) in own
        ),
        hidden_size=text.hidden_size,
        outputs_per_read=-(-text.vocab_size // tp) if head == "token" else 1,
        key_value_numbers=text.num_hidden_layers * sum(cached_widths(text)),
        saved_per_token=saved,
        shared_per_token=shared,
        compute_bytes=compute.itemsize,
    )


def cached_widths(config: Any) -> tuple[int, int]:
    """Numbers that a layer's KV cache holds for one token: of its keys, and of its values.

    `config` is a text model's. Latent attention holds what keys and values are made from, and the
    rotary part of the keys, which all heads share.
    """
    if getattr(config, "kv_lora_rank", None):
        return config.qk_rope_head_dim, config.kv_lora_rank
    heads = getattr(config, "num_attention_heads", None) or 0  # none: a model without attention
    size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        groups = 1  # falcon, gpt_bigcode: all heads share their keys
    return groups * size, groups * size


def meta_model(config: ModelConfig, head: Head) -> Any:
    """The module without any memory, adapters included."""
    folder = str(model_folder(config.path, weights=False))  # shapes are in the small files
    plain = replace(
        config, path=folder, attn_implementation="auto", enable_gradient_checkpointing=False
    )
    module = empty_model(plain, head, torch.device("cpu")).to("meta")
    if config.lora_rank > 0:
        add_adapter(module, config)
    return module


def check_adapter(config: ModelConfig, head: Head) -> None:
    """Refuse `target_modules` that the model of `config.path` does not have; nothing is loaded."""
    if config.lora_rank > 0:
        meta_model(config, head)


NUM_TRACED = 256
"""Tokens of the traced pass; what is saved grows with them in proportion."""


def saved_per_token(
    config: ModelConfig, body: Any, compute: torch.dtype, tp: int = 1
) -> tuple[int | None, int]:
    """Bytes that autograd saves for a token of the body, weights left out; how many of them are
    other ranks' of `tp`.

    Heads, and what is inside of MLPs, is cut; hidden states are whole on every rank, but what is
    saved of them is kept in parts (`workers.parallel.kept_parts`).
    """
    key = repr(config), body.config.to_json_string(), compute
    if key not in _traced:
        _traced[key] = _whole_and_cut(body.to(compute))
    found = _traced[key]
    if found is None:
        return None, 0
    whole, cut = found
    return -(-(whole + cut // tp) // NUM_TRACED), whole * (tp - 1) // tp // NUM_TRACED


_traced: dict[tuple[Any, ...], tuple[int, int] | None] = {}


def _whole_and_cut(body: Any) -> tuple[int, int] | None:
    """Saved bytes of hidden states, and of all else."""
    saved = _saved(body)
    if saved is None:
        return None
    hidden_size = body.config.get_text_config().hidden_size
    sizes = [0, 0]
    for tensor in saved:
        are_states = tensor.dim() <= 3 and tensor.shape[-1] == hidden_size
        sizes[not are_states] += tensor.untyped_storage().nbytes()
    return sizes[0], sizes[1]


def _saved(module: Any) -> list[Tensor] | None:
    """What a pass of `NUM_TRACED` tokens saves; None where it cannot be traced."""
    weights = {weight.untyped_storage()._cdata for weight in module.parameters()}
    ids = torch.zeros(1, NUM_TRACED, dtype=torch.long, device="meta")
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            found.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    counted = attending_by(module, COUNTED, _attention, _no_mask)
    try:
        with counted, saved_tensors_hooks(keep, lambda tensor: tensor):
            module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None  # a model whose pass depends on its numbers, as a router's does
    return list(found.values())


class _FusedAttention(torch.autograd.Function):
    """What a fused kernel saves, without its arithmetic."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, tokens, _ = query.shape
        output = query.new_empty(rows, tokens, heads, value.shape[-1])
        log_norm = query.new_empty(rows, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_norm)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return ctx.saved_tensors[:3]


def _attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _FusedAttention.apply(query, key, value), None


def _no_mask(**_: Any) -> None:
    """A fused kernel needs none."""
