"""Count the weights and activations that determine a model's memory, on the meta device.

    shapes = model_shapes(config, head="token", compute=torch.bfloat16)
    shapes.num_weights                            # exact count
    shapes.trained_pass(num_tokens=8192, head=0, checkpointing=False)    # bytes, or None

Activations are traced in a pass of the model itself (`workers.models.pass_trace`), so this works
for every architecture whose operations do not depend on values. The trace covers what autograd
saves, and what a layer needs temporarily. Attention counts as a fused kernel: queries, keys,
values, output, their gradients, and one number per token and head, but nothing that grows with the
square of the length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from workers.models.attention import heads_of
from workers.models.causal_lm import Head, body_of, empty_model
from workers.models.folder import model_folder
from workers.models.lora import add_adapter
from workers.models.pass_trace import PassTrace, trace_pass
from workers.models.quantize import quantizable
from workers.parallel.experts import experts_of
from workers.parallel.pipeline import max_pending_passes, num_chunks
from workers.parallel.stages import Stages, stage_ranges

if TYPE_CHECKING:
    from workers.config import ModelConfig


@dataclass(frozen=True)
class PassShapes:
    """Bytes per token that a pass over the body needs, without the weights."""

    saved: int
    """Bytes that autograd saves."""
    outside_layers: int
    """The part of `saved` that is saved before the first layer or after the last."""
    layer: int
    """Peak of a layer's forward and backward pass, without its input."""
    backward: int
    """Peak of a layer's backward pass, in addition to the saved tensors."""
    unsaved: int
    """Peak of a layer in a pass without gradients, without its input."""
    layer_inputs: int
    """Other inputs that every layer gets, such as rotary angles."""


class Moments(NamedTuple):
    """Bytes in use at the two moments of a pass when memory can peak."""

    at_head: float
    in_layer: float


@dataclass(frozen=True)
class ModelShapes:
    """Counts of a model's weights, and the bytes that a pass needs.

    If matrices or layers are split over ranks, these are the counts of one rank.
    """

    num_weights: int
    num_trained: int
    num_int8: int
    """Weights of linear layers that quantization stores as int8."""
    num_scales: int
    """Number of float32 scales of the int8 weights."""
    num_layers: int
    num_outside_layers: int
    """Weights of embeddings, last norm and head, which FSDP keeps gathered throughout a pass."""
    num_embeddings: int
    """Weights of the embeddings; 0 if the head shares them."""
    num_in_experts: int
    """Weights of routed experts, which expert parallelism can split over ranks."""
    hidden_size: int
    outputs_per_read: int
    """Outputs of the head per position: the size of the vocabulary, or one."""
    key_value_numbers: int
    """Numbers that a KV cache stores per token."""
    trains_head: bool
    can_recompute: bool
    """True if the model class has gradient checkpointing."""
    compute_bytes: int
    body: PassShapes | None = None
    """Bytes per token of a pass over the body; None if a pass cannot be traced."""
    num_waiting: int = 1
    """Number of forward passes that wait for their backward passes."""

    def weight_bytes(self, dtype: torch.dtype, quantization: str | None = None) -> int:
        """Return the bytes of the weights in this dtype, or quantized."""
        if not quantization:
            return self.num_weights * dtype.itemsize
        return (self.num_weights - self.num_int8) * dtype.itemsize + (
            self.num_int8 + 4 * self.num_scales
        )

    def trained_pass(self, num_tokens: int, head: int, checkpointing: bool) -> Moments | None:
        """Return the bytes of a forward and backward pass: at the head, and in a layer.

        The head needs `head` bytes, which are free again when the layers run backward. Return None
        if a pass cannot be traced.
        """
        if self.body is None:
            return None
        states = self.hidden_size * self.compute_bytes
        if checkpointing:  # inputs of all layers, output of the last one, and one recomputed layer
            states_kept = states * (self.num_layers * self.num_waiting + 1) + self.body.layer_inputs
            at_head, in_layer = self.body.outside_layers, self.body.layer
        else:
            states_kept = self.body.saved * self.num_waiting
            at_head, in_layer = 0, self.body.backward
        return Moments(
            num_tokens * (states_kept + at_head) + head, num_tokens * (states_kept + in_layer)
        )

    def reading_pass(self, num_tokens: int, head: int) -> Moments | None:
        """Return the bytes of a pass without gradients, at the head and in a layer."""
        if self.body is None:
            return None
        states = self.hidden_size * self.compute_bytes
        in_layer = 2 * states + self.body.layer_inputs + self.body.unsaved
        return Moments(head, num_tokens * in_layer)


_known: dict[tuple[Any, ...], ModelShapes] = {}
"""Shapes by settings, text of config.json, head, compute dtype, tp and position of the rank.

Most roles of a run have the same shapes, and tracing a pass takes half a second.
"""


@dataclass(frozen=True)
class StageOf:
    """Position of a rank in the pipeline."""

    rank: int
    num_ranks: int
    schedule: str
    ep: int = 1


def described_by(config: ModelConfig) -> str:
    """Return the text of the model's config.json, or ""."""
    file = model_folder(config.path, weights=False) / "config.json"
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def model_shapes(
    config: ModelConfig,
    head: Head,
    compute: torch.dtype,
    tp: int = 1,
    stage: StageOf | None = None,
) -> ModelShapes:
    """Return the shapes of the model in `config.path` for this compute dtype.

    `tp` and `stage` select what one rank has.
    """
    config = replace(config, enable_gradient_checkpointing=None)  # has no effect on shapes
    model = repr(config), described_by(config), head
    known = (*model, compute, tp, stage)
    if known not in _known:
        if model not in _weights:
            _weights[model] = CountedWeights(meta_model(config, head))
        weights = _weights[model]
        if stage is None:
            _known[known] = _whole(config, weights, head, compute, tp)
        else:
            full = model_shapes(config, head, compute, tp)
            for place, shapes in _of_stages(full, weights, tp, stage):
                _known[(*known[:-1], place)] = shapes
    return _known[known]


class CountedWeights:
    """A module's weights by id, and the sets of ids that are counted."""

    def __init__(self, module: Any) -> None:
        self.module = module
        own_head = module.get_output_embeddings()
        embeddings = body_of(module).get_input_embeddings().weight
        self.numels = {id(weight): weight.numel() for weight in module.parameters()}
        self.trained = _ids(weight for weight in module.parameters() if weight.requires_grad)
        self.embeddings = {id(embeddings)}
        self.is_tied = own_head is not None and own_head.weight is embeddings
        self.trains_head = own_head is not None and own_head.weight.requires_grad
        self.linears = [layer.weight for _, layer in quantizable(module)]

        layers = set(module._no_split_modules or ())
        in_layers = (child for child in module.modules() if type(child).__name__ in layers)
        self.in_layers = _ids(weight for layer in in_layers for weight in layer.parameters())
        experts = (child for _, child in experts_of(module))
        self.in_experts = _ids(weight for child in experts for weight in child.parameters())

    @cached_property
    def cut(self) -> set[int]:
        """Ids of the weights that tp splits."""
        from workers.parallel import tensor  # imported late: it loads torch's DTensor

        return tensor.cut_weights(self.module)

    def count(self, which: Set[int], mine: Set[int] | None, tp: int) -> int:
        """Count the elements of these weights, or only of those that a rank holds."""
        here = which if mine is None else which & mine
        if tp == 1:
            return sum(self.numels[n] for n in here)
        return sum(-(-self.numels[n] // tp) if n in self.cut else self.numels[n] for n in here)

    def counts(self, mine: Set[int] | None, tp: int) -> dict[str, int]:
        """Return the counts of `ModelShapes` for all weights, or for the weights of a rank."""
        num_weights = self.count(self.numels.keys(), mine, tp)
        return {
            "num_weights": num_weights,
            "num_trained": self.count(self.trained, mine, tp),
            "num_outside_layers": num_weights - self.count(self.in_layers, mine, tp),
            "num_embeddings": 0 if self.is_tied else self.count(self.embeddings, mine, tp),
            "num_in_experts": self.count(self.in_experts, mine, 1),
        }


_weights: dict[tuple[str, str, str], CountedWeights] = {}
"""Weights by settings, text of config.json and head."""


def _ids(weights: Iterable[Tensor]) -> set[int]:
    return {id(weight) for weight in weights}


def _of_stages(
    full: ModelShapes, weights: CountedWeights, tp: int, stage: StageOf
) -> Iterator[tuple[StageOf, ModelShapes]]:
    """Yield the shapes of every rank in the pipeline that `stage` belongs to."""
    num_stages = stage.num_ranks * num_chunks(stage.schedule)
    ranges = stage_ranges(weights.module, num_stages, stage.ep)
    stages = Stages(weights.module, ranges)
    for rank in range(stage.num_ranks):
        numbers = range(rank, num_stages, stage.num_ranks)
        num_layers = sum(len(ranges[number]) for number in numbers)
        is_last = rank == stage.num_ranks - 1
        of_rank: Any = weights.counts(stages.weights(numbers), tp)
        yield (
            replace(stage, rank=rank),
            replace(
                full,
                **of_rank,
                num_layers=num_layers,
                outputs_per_read=full.outputs_per_read if is_last else 0,
                body=full.body
                and replace(full.body, saved=full.body.saved * num_layers // full.num_layers),
                num_waiting=max_pending_passes(stage.schedule, rank, stage.num_ranks),
            ),
        )


def _whole(
    config: ModelConfig, weights: CountedWeights, head: Head, compute: torch.dtype, tp: int
) -> ModelShapes:
    body, text = body_of(weights.module), weights.module.config.get_text_config()
    if tp > 1:
        from workers.parallel import tensor  # imported late: it loads torch's DTensor

        tensor.check(weights.module, tp, "parallel.tp")
    of_weights: Any = weights.counts(None, tp)
    return ModelShapes(
        **of_weights,
        num_int8=sum(weight.numel() for weight in weights.linears),
        num_scales=sum(len(weight) for weight in weights.linears),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        outputs_per_read=-(-text.vocab_size // tp) if head == "token" else 1,
        key_value_numbers=text.num_hidden_layers * sum(cached_widths(text)),
        trains_head=weights.trains_head,
        can_recompute=weights.module.supports_gradient_checkpointing,
        compute_bytes=compute.itemsize,
        body=pass_shapes(config, body, compute, tp),
    )


def cached_widths(config: Any) -> tuple[int, int]:
    """Return how many numbers a layer caches per token, for keys and for values.

    `config` is that of a text model. Latent attention caches the compressed input of keys and
    values, and the rotary part of the keys, which all heads share.
    """
    if getattr(config, "kv_lora_rank", None):
        return config.qk_rope_head_dim, config.kv_lora_rank
    _, groups, size = heads_of(config)
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        groups = 1  # falcon, gpt_bigcode: all heads share their keys
    return groups * size, groups * size


def meta_model(config: ModelConfig, head: Head) -> Any:
    """Return the module on the meta device, with its adapters."""
    folder = str(model_folder(config.path, weights=False))  # the small files are enough for shapes
    plain = replace(
        config, path=folder, attn_implementation="auto", enable_gradient_checkpointing=False
    )
    module = empty_model(plain, head, torch.device("cpu")).to("meta")
    if config.lora_rank > 0:
        add_adapter(module, config)
    return module


def check_adapter(config: ModelConfig, head: Head) -> None:
    """Raise if adapters do not fit the configured `target_modules`. No weights are loaded."""
    if config.lora_rank > 0:
        meta_model(config, head)


def pass_shapes(
    config: ModelConfig, body: Any, compute: torch.dtype, tp: int = 1
) -> PassShapes | None:
    """Return the shapes of a pass on one rank of `tp`, which splits heads and MLP hidden sizes.

    Hidden states are whole on every rank.
    """
    key = repr(config), body.config.to_json_string(), compute
    if key not in _traced:
        _traced[key] = trace_pass(body.to(compute))
    trace = _traced[key]
    if trace is None:
        return None
    saved, in_layers = trace.saved, trace.saved_in_layers
    return PassShapes(
        saved=saved.of(tp),
        outside_layers=max(0, saved.of(tp) - in_layers.of(tp)),
        layer=trace.layer.most(tp),
        backward=trace.layer.most_beside_saved(tp),
        unsaved=trace.layer.most_unsaved(tp),
        layer_inputs=trace.layer_inputs.of(tp),
    )


_traced: dict[tuple[Any, ...], PassTrace | None] = {}
