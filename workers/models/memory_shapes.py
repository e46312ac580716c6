"""Count the weights and activations that determine a model's memory, on the meta device.

    shapes = model_shapes(config, head="token", compute=torch.bfloat16)
    shapes.num_weights                            # exact count
    shapes.trained_pass(num_tokens=8192, head=0, recomputed=0)    # bytes, or None

Activations are traced in a pass of the model itself (`workers.models.pass_trace`), so this works
for every architecture whose operations do not depend on values. The trace covers what autograd
saves, and what a layer needs temporarily. Attention counts as a fused kernel: queries, keys,
values, output, their gradients, and one number per token and head, but nothing that grows with the
square of the length.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workers.config import ModelConfig
from workers.models.attention import heads_of, layer_configs
from workers.models.causal_lm import Head, body_of, empty_model, language_half, quantizable
from workers.models.folder import model_folder
from workers.models.pass_trace import PassShapes, PassTrace, trace_pass
from workers.models.state import is_adapter
from workers.parallel.fsdp import experts_of


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
    """Weights of linear layers that quantization stores as int8 or in 4 bits."""
    num_scales: int
    """Number of float32 scales of the int8 weights."""
    num_layers: int
    num_outside_layers: int
    """Weights of embeddings, towers, last norm and head, which FSDP keeps gathered in a pass."""
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
        linears = self.num_int8 + 4 * self.num_scales
        if quantization == "nf4":
            from workers.models.quantize import BLOCK

            linears = self.num_int8 // 2 + 4 * self.num_int8 // BLOCK
        return (self.num_weights - self.num_int8) * dtype.itemsize + linears

    def trained_pass(self, num_tokens: int, head: int, recomputed: int) -> Moments | None:
        """Return the bytes of a forward and backward pass: at the head, and in a layer.

        The first `recomputed` layers keep only their inputs. The head needs `head` bytes, which are
        free again when the layers run backward. Return None if a pass cannot be traced.
        """
        if self.body is None:
            return None
        states = self.hidden_size * self.compute_bytes
        again = min(recomputed, self.num_layers)
        saved = self.body.saved * self.num_waiting * (self.num_layers - again) / self.num_layers
        if not again:
            at_head, in_layer = saved, saved + self.body.backward
        else:  # inputs of layers, output of the last one, and one recomputed layer
            inputs = states * (again * self.num_waiting + 1) + self.body.layer_inputs
            at_head = saved + inputs + self.body.outside_layers
            in_layer = inputs + max(self.body.layer, (saved > 0) * (saved + self.body.backward))
        return Moments(num_tokens * at_head + head, num_tokens * in_layer)

    def reading_pass(self, num_tokens: int, head: int) -> Moments | None:
        """Return the bytes of a pass without gradients, at the head and in a layer."""
        if self.body is None:
            return None
        states = self.hidden_size * self.compute_bytes
        in_layer = 2 * states + self.body.layer_inputs + self.body.unsaved
        return Moments(head, num_tokens * in_layer)


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


@dataclass(frozen=True)
class _Described:
    """A model and its head, compared by the settings and the text of config.json.

    Results are cached by it, because most roles of a run have the same shapes, and tracing a pass
    takes half a second.
    """

    settings: str
    text: str
    head: Head
    config: ModelConfig = field(compare=False)


def _described(config: ModelConfig, head: Head) -> _Described:
    config = replace(config, enable_gradient_checkpointing=None)  # has no effect on shapes
    return _Described(repr(config), described_by(config), head, config)


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
    model = _described(config, head)
    if stage is None:
        return _unsplit(model, compute, tp)
    return _stage_shapes(model, compute, tp, replace(stage, rank=0))[stage.rank]


def count_weights(config: ModelConfig, head: Head) -> int:
    """Return the number of weights of the model in `config.path`, which are not loaded."""
    return sum(_counted(_described(config, head)).numels.values())


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
        self.linears = [
            layer.weight for name, layer in quantizable(module) if not is_adapter(f"{name}.")
        ]

        layers = set(module._no_split_modules or ())
        language = language_half(module)  # a tower belongs to FSDP's unit of the rest
        in_layers = (child for child in language.modules() if type(child).__name__ in layers)
        self.in_layers = _ids(weight for layer in in_layers for weight in layer.parameters())
        experts = (child for _, child in experts_of(module))
        self.in_experts = _ids(weight for child in experts for weight in child.parameters())

    @cached_property
    def cut(self) -> set[int]:
        """Ids of the weights that tp splits."""
        from workers.parallel import tensor  # imported late: it loads torch's DTensor

        return tensor.cut_weights(self.module)

    def count(self, which: Set[int], on_rank: Set[int] | None, tp: int) -> int:
        """Count the elements of these weights, or only of those that a rank holds."""
        here = which if on_rank is None else which & on_rank
        if tp == 1:
            return sum(self.numels[n] for n in here)
        return sum(-(-self.numels[n] // tp) if n in self.cut else self.numels[n] for n in here)

    def counts(self, on_rank: Set[int] | None, tp: int) -> dict[str, int]:
        """Return the counts of `ModelShapes` for all weights, or for the weights of a rank."""
        num_weights = self.count(self.numels.keys(), on_rank, tp)
        return {
            "num_weights": num_weights,
            "num_trained": self.count(self.trained, on_rank, tp),
            "num_outside_layers": num_weights - self.count(self.in_layers, on_rank, tp),
            "num_embeddings": 0 if self.is_tied else self.count(self.embeddings, on_rank, tp),
            "num_in_experts": self.count(self.in_experts, on_rank, 1),
        }


@cache
def _counted(model: _Described) -> CountedWeights:
    return CountedWeights(meta_model(model.config, model.head))


def _ids(weights: Iterable[Tensor]) -> set[int]:
    return {id(weight) for weight in weights}


@cache
def _stage_shapes(
    model: _Described, compute: torch.dtype, tp: int, stage: StageOf
) -> list[ModelShapes]:
    """Return the shapes of every rank in the pipeline that `stage` belongs to."""
    from workers.parallel.pipeline import Stages, max_pending_passes, num_chunks, stage_ranges

    full, weights = _unsplit(model, compute, tp), _counted(model)
    num_stages = stage.num_ranks * num_chunks(stage.schedule)
    ranges = stage_ranges(weights.module, num_stages, stage.ep)
    stages = Stages(weights.module, ranges)
    ranks = []
    for rank in range(stage.num_ranks):
        numbers = range(rank, num_stages, stage.num_ranks)
        num_layers = sum(len(ranges[number]) for number in numbers)
        is_last = rank == stage.num_ranks - 1
        body = full.body
        if body is not None:
            body = replace(body, saved=body.saved * num_layers // full.num_layers)
        of_rank: Any = weights.counts(stages.weights(numbers), tp)
        ranks.append(
            replace(
                full,
                **of_rank,
                num_layers=num_layers,
                outputs_per_read=full.outputs_per_read if is_last else 0,
                body=body,
                num_waiting=max_pending_passes(stage.schedule, rank, stage.num_ranks),
            )
        )
    return ranks


@cache
def _unsplit(model: _Described, compute: torch.dtype, tp: int) -> ModelShapes:
    """Return the sizes of a model's weights and activations without pipeline stages."""
    weights = _counted(model)
    body, text = language_half(weights.module), weights.module.config.get_text_config()
    if tp > 1:
        from workers.parallel import tensor  # imported late: it loads torch's DTensor

        tensor.check_split(weights.module, tp, "parallel.tp")
    traced = model.settings, body.config.to_json_string(), compute
    if traced not in _traces:  # the trace is the same with any head
        _traces[traced] = trace_pass(body.to(compute))
    trace = _traces[traced]
    of_weights: Any = weights.counts(None, tp)
    return ModelShapes(
        **of_weights,
        num_int8=sum(weight.numel() for weight in weights.linears),
        num_scales=sum(len(weight) for weight in weights.linears),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        outputs_per_read=-(-text.vocab_size // tp) if model.head == "token" else 1,
        key_value_numbers=sum(sum(cached_widths(layer)) for layer in layer_configs(text)),
        trains_head=weights.trains_head,
        can_recompute=weights.module.supports_gradient_checkpointing,
        compute_bytes=compute.itemsize,
        body=None if trace is None else trace.shapes(tp),
    )


_traces: dict[tuple[str, str, torch.dtype], PassTrace | None] = {}


def cached_widths(config: Any) -> tuple[int, int]:
    """Return how many numbers a layer caches per token, for keys and for values.

    `config` is a layer's configuration. Latent attention caches the compressed input of keys and
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
        from workers.models.lora import add_adapter

        add_adapter(module, config)
    return module


def check_adapter(config: ModelConfig, head: Head) -> None:
    """Raise if adapters or the base's quantization do not fit the model. No weights are loaded."""
    if config.quantization is not None:
        from workers.models.quantize import check_nf4

        check_nf4(config)
    if config.lora_rank > 0:
        meta_model(config, head)
