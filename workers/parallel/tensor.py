"""Tensor parallelism: the layers of a model are split over the ranks of the mesh axis "tp".

    cut = apply(module, mesh["tp"])     # before FSDP2, and before weights are loaded
    ...                                 # forward and backward passes of a mini-batch
    cut.add_up_gradients()              # of weights that are used with only some of the heads

The plans in transformers' configs and classes define which layers are split, and how;
`RULES_ELSEWHERE` completes them. Only the plans are used, because transformers' code that applies
them differs between versions. The ranks of the axis have the same rows. Hidden states between
layers are whole on all of them. A layer that is split by columns computes some of its outputs from
whole inputs. A layer that is split by rows takes these as inputs and sums its outputs over the
ranks: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053).

Every parameter becomes a DTensor. Layers compute with the local shards, so they use the same
kernels as in a plain module. Embeddings and head, if they are plain layers, are split along the
vocabulary, whatever the plan says, and logits stay split (`workers.parallel.vocabulary`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from verl_like.errors import ConfigError
from workers.parallel.fsdp import add_up_gradients
from workers.parallel.groups import communicate
from workers.parallel.placements import local_part
from workers.parallel.vocabulary import VocabShard

COPY_ATTRIBUTE = "_copy_for_cut_layers"
"""Attribute of hidden states for a copy that all layers that are split by columns use."""
HEAD_NORM = re.compile(r"(q|k|v|query|key)_?(norm|layernorm)")
"""Norms of heads. Every rank has their weights, but applies them only to its own heads."""
LOW_RANK_LAYERS = re.compile(r"(q|kv)_a_(proj.*|layernorm)")
"""Layers of latent attention whose outputs all heads use."""

USE_OTHERS = ("gemma3n", "gemma4")
"""Prefixes of model types whose layers use the weights of other layers."""


class WholeLayer:
    """A layer that every rank computes completely; the base class of the other styles."""

    weight: Placement = Replicate()
    """Placement of the layer's `weight`."""
    others: Placement = Replicate()
    """Placement of the layer's other parameters."""
    partial = False
    """True if the weights' gradients on a rank are partial and must be summed."""

    def __init__(self, group: dist.ProcessGroup, config: Any) -> None:
        self.group, self.config = group, config

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the positional arguments for the layer's computation."""
        return inputs

    def leave(self, output: Any) -> Any:
        """Return the output that other layers get."""
        return output

    def restore(self, layer: Any) -> None:
        """Undo what `enter` changed in the layer; also called after an error."""

    def copied(self, states: Tensor) -> Tensor:
        """Return a copy for all layers with this input, so that its gradient is summed once."""
        if not (torch.is_grad_enabled() and states.requires_grad):
            return states
        copy: Tensor | None = getattr(states, COPY_ATTRIBUTE, None)
        if copy is None:
            # `data`, not a view: a view and its base would keep each other alive
            copy = communicate(states, lambda tensor: tensor.data, self._sum)
            setattr(states, COPY_ATTRIBUTE, copy)
        return copy

    def added_up(self, part: Tensor) -> Tensor:
        """Return the sum over the ranks; each rank's part gets the gradient of the sum."""
        return communicate(part, self._sum, lambda grad: grad)

    def _sum(self, part: Tensor) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def _gather(self, part: Tensor) -> Tensor:
        """Concatenate the columns of all ranks."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.group.size())]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, dim=-1)

    def _local_columns(self, states: Tensor) -> Tensor:
        return states.chunk(self.group.size(), dim=-1)[self.group.rank()].contiguous()


class PartialWeights(WholeLayer):
    """A layer whose weights see only some of the inputs, such as a norm of the rank's heads."""

    partial = True


class ColumnLinear(WholeLayer):
    """A linear layer of which each rank computes some outputs."""

    weight = others = Shard(0)

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take whole states."""
        return (self.copied(inputs[0]), *inputs[1:])


class GatheredColumnLinear(ColumnLinear):
    """A column layer with gathered outputs, because the model splits or norms them differently."""

    def leave(self, output: Any) -> Any:
        """Return whole states; the following layers compute the same on every rank."""
        return communicate(output, self._gather, self._local_columns)


class RowLinear(WholeLayer):
    """A linear layer whose inputs are the rank's columns; its outputs are summed over the ranks.

    The bias is added to the sum. The output of an adapter is summed together with the layer's.
    """

    weight = Shard(1)

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take the rank's columns; remove the bias."""
        parameters = getattr(layer, "base_layer", layer)._parameters
        self.bias, parameters["bias"] = parameters["bias"], None
        return inputs

    def restore(self, layer: Any) -> None:
        """Restore the bias."""
        getattr(layer, "base_layer", layer)._parameters["bias"] = self.bias

    def leave(self, output: Any) -> Any:
        """Return whole states, with the bias."""
        total = self.added_up(output)
        return total if self.bias is None else total + local_part(self.bias)


class SplitRowLinear(RowLinear):
    """A row layer whose input is not split."""

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take this rank's columns of the input, which is not split."""
        columns = communicate(inputs[0], self._local_columns, self._gather)
        return super().enter(layer, (columns, *inputs[1:]))


class VocabularyRows(WholeLayer):
    """Embeddings of the rank's tokens; those of other ranks' tokens are zero before the sum."""

    weight = others = Shard(0)

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Convert token ids to indices among the rank's tokens."""
        vocab = VocabShard.of(layer.num_embeddings, self.group)
        ids, self.is_other = vocab.local_indices(inputs[0])
        return (ids, *inputs[1:])

    def leave(self, output: Any) -> Any:
        """Return whole states."""
        return self.added_up(output.masked_fill(self.is_other[..., None], 0.0))


class Experts(WholeLayer):
    """Experts whose matrices are split over the ranks; their outputs are summed."""

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take whole states and choices; the router's weights get gradients from all ranks."""
        states, choices, weights = inputs
        return self.copied(states), choices, self.copied(weights)

    def leave(self, output: Any) -> Any:
        """Return whole states."""
        return self.added_up(output)


class LatentKeys(WholeLayer):
    """First layer of latent attention: all heads use the rotary part of its output directly."""

    def leave(self, output: Any) -> Any:
        """Let the rotary part get gradients from the heads of all ranks."""
        size = self.config.qk_rope_head_dim
        latent, rotary = output.split([output.shape[-1] - size, size], dim=-1)
        return torch.cat([latent, self.copied(rotary)], dim=-1)


STYLES: dict[str, type[WholeLayer]] = {
    "colwise": ColumnLinear,
    "colwise_gather_output": GatheredColumnLinear,
    "colwise_rep": GatheredColumnLinear,
    "rowwise": RowLinear,
    "rowwise_split_input": SplitRowLinear,
    "rowwise_rep": SplitRowLinear,
    "embedding_rowwise": VocabularyRows,
    "replicated_with_grad_allreduce": PartialWeights,
    "mla_kv_a_proj": LatentKeys,
    "moe_tp_experts": Experts,
}
"""Names of layer styles in the supported versions of transformers."""
PLACEMENTS: dict[str, Placement] = {
    "colwise": Shard(-2),
    "rowwise": Shard(-1),
    "packed_colwise": _StridedShard(-2, split_factor=2),
}
"""Placements of single parameters by their style's name. A packed parameter is two in one."""

RULES_ELSEWHERE: dict[str, dict[str, str]] = {
    "qwen2_moe": {
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.shared_expert.gate_proj": "colwise",
        "layers.*.mlp.shared_expert.up_proj": "colwise",
        "layers.*.mlp.shared_expert.down_proj": "rowwise",
    }
}
"""Model type -> rules for layers that transformers' plan leaves out, in the terms of the plans."""


@dataclass(frozen=True)
class Layer:
    """How a layer is split: its computation, and the placements of its parameters."""

    style: type[WholeLayer] = WholeLayer
    placements: Mapping[str, Placement] = field(default_factory=dict)

    def placement(self, name: str, weight: Tensor) -> Placement:
        """Return the placement of the layer's parameter `name`."""
        by_style = self.style.weight if name == "weight" else self.style.others
        placement = self.placements.get(name, by_style)
        if isinstance(placement, _StridedShard):
            return _StridedShard(placement.dim % weight.ndim, split_factor=placement.split_factor)
        return Shard(placement.dim % weight.ndim) if isinstance(placement, Shard) else placement


@dataclass(frozen=True)
class ModuleSplit:
    """The split of a module over the ranks of one axis."""

    group: dist.ProcessGroup
    partial: list[tuple[nn.Module, str]]
    """(layer, name) of the parameters whose gradients are partial sums."""
    vocab: VocabShard | None
    """The tokens of this rank's head; None if the rank computes the logits of all tokens."""

    def keep_here(self, module: nn.Module) -> None:
        """Drop the layers that are no longer in the module."""
        here = {id(child) for child in module.modules()}
        self.partial[:] = [pair for pair in self.partial if id(pair[0]) in here]

    def add_up_gradients(self) -> None:
        """Sum partial gradients over the ranks; called once per mini-batch."""
        weights = [getattr(layer, name) for layer, name in self.partial]
        add_up_gradients([weight for weight in weights if weight.requires_grad], self.group)


def split_module(module: Any, mesh: DeviceMesh) -> ModuleSplit:
    """Split the module's parameters over the only axis of `mesh`, and hook its layers.

    Adapters must already be added; weights may still be on the meta device. Call `check` first.
    """
    group, config = mesh.get_group(), module.config.get_text_config()
    layers = layers_of(module)
    distributed: dict[int, nn.Parameter] = {}
    partial = []
    for path, layer in module.named_modules():
        rule = layers.get(path, Layer(WholeLayer))
        style = rule.style(group, config)
        for name, weight in layer._parameters.items():
            if weight is None:
                continue
            placement = rule.placement(name, weight)
            parameter = distributed.setdefault(id(weight), _distributed(weight, mesh, placement))
            placements = getattr(parameter.data, "placements")  # noqa: B009 - of a DTensor
            assert placements == (placement,), f"{path}.{name} is tied and differs"
            layer._parameters[name] = parameter
            if style.partial:
                partial.append((layer, name))
        if layer._parameters or rule.style is not WholeLayer:
            _hook(layer, style)

    embeddings = _body(module).get_input_embeddings()
    if getattr(embeddings, "padding_idx", None) is not None:  # the padding row gets no gradient
        vocab, token = VocabShard.of(embeddings.num_embeddings, group), embeddings.padding_idx
        embeddings.padding_idx = token - vocab.first if vocab.has(token) else None
    head = module.get_output_embeddings()
    weight = getattr(head, "base_layer", head).weight
    is_cut = isinstance(weight, DTensor) and weight.placements == (Shard(0),)
    return ModuleSplit(group, partial, VocabShard.of(len(weight), group) if is_cut else None)


def _body(module: Any) -> Any:
    """Return the base model without its head."""
    return getattr(module, module.base_model_prefix, module)


def _hook(layer: nn.Module, style: WholeLayer) -> None:
    """Make the layer compute with the local parts of its parameters, as `style` defines."""
    dtensors: dict[str, Any] = {}

    def before(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs = style.enter(layer, inputs)
        for name, weight in layer._parameters.items():
            if isinstance(weight, DTensor):
                dtensors[name] = weight
        layer._parameters.update({name: weight.to_local() for name, weight in dtensors.items()})
        return inputs

    def after(layer: Any, _inputs: Any, output: Any) -> Any:
        layer._parameters.update(dtensors)
        dtensors.clear()
        style.restore(layer)
        return None if output is None else style.leave(output)  # None after an error

    layer.register_forward_pre_hook(before)
    # recomputation of a checkpointed layer stops early by raising an exception
    layer.register_forward_hook(after, always_call=True)


def _distributed(weight: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return the weight as a DTensor with its local part."""
    part = weight.detach()
    if isinstance(placement, Shard | _StridedShard):
        dim, count = placement.dim, mesh.size()
        cuts = []
        for block in part.chunk(getattr(placement, "split_factor", 1), dim):
            most = -(-block.shape[dim] // count)
            first = min(mesh.get_local_rank() * most, block.shape[dim])
            cuts.append(block.narrow(dim, first, min(most, block.shape[dim] - first)))
        part = torch.cat(cuts, dim)
    distributed = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return nn.Parameter(distributed, requires_grad=weight.requires_grad)


class NoSplit(ValueError):
    """Raised if tensor parallelism cannot split a model; its text completes a sentence."""


def layers_of(module: Any) -> dict[str, Layer]:
    """Return how layers are split, by name; all other layers are whole on every rank.

    In transformers' plans of layers and parameters, `*` stands for a number.
    """
    prefix, model_type = f"{module.base_model_prefix}.", module.config.model_type
    plan: dict[str, str] | None = getattr(module, "_tp_plan", None)
    if plan is None:  # a scalar head has no class of its own
        of_body = getattr(_body(module), "_tp_plan", None) or {}
        plan = {f"{prefix}{name}": style for name, style in of_body.items()}
    if not any(name.startswith(prefix) for name in plan):
        raise NoSplit(f"transformers has no tensor parallel plan for {model_type}")
    others = RULES_ELSEWHERE.get(model_type, {})
    plan = {f"{prefix}{name}": style for name, style in others.items()} | plan
    has_convolution = any(isinstance(layer, nn.Conv1d) for layer in module.modules())
    if has_convolution or model_type.startswith(USE_OTHERS):
        raise NoSplit(f"layers of {model_type} use the weights of other layers")
    layers: dict[str, Layer] = {}
    columns: list[str] = []
    for path, layer in module.named_modules():
        base = getattr(layer, "base_layer", layer)
        placements = _placements_by_plan(plan, path, base)
        style = _style_by_plan(plan, path, base, placements)
        if style is not None:
            layers |= _with_adapter(path, layer, style, placements)
            columns += [path] if style is ColumnLinear else []
        elif placements:
            layers[path] = Layer(WholeLayer, placements)
    layers |= _layers_by_words(module)
    _reject_unused(module, plan, layers)
    for path in columns:
        layers |= _siblings_without_rule(module, path.rpartition(".")[0], layers)
    return layers


def _rule_for(name: str) -> str:
    """Return the key of the plan's rule for a layer or parameter."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _placements_by_plan(plan: Mapping[str, str], path: str, layer: Any) -> dict[str, Placement]:
    """Return the placements of the layer's parameters that have rules of their own."""
    placements = {}
    for name in layer._parameters:
        style = plan.get(_rule_for(f"{path}.{name}"))
        if style is None:
            continue
        if style not in PLACEMENTS:
            raise NoSplit(
                f"the tensor-parallel plan in transformers splits weights of {path} by an unknown "
                f"style: {style}"
            )
        placements[name] = PLACEMENTS[style]
    return placements


def _style_by_plan(
    plan: Mapping[str, str], path: str, layer: Any, placements: Mapping[str, Placement]
) -> type[WholeLayer] | None:
    """Return how the plan computes a layer; None without a rule."""
    name = plan.get(_rule_for(path))
    if name is None:
        return None
    style = STYLES.get(name)
    if style is None:
        raise NoSplit(f"transformers' plan splits {path} in an unknown way: {name}")
    if issubclass(style, ColumnLinear | RowLinear) and not isinstance(layer, nn.Linear):
        other = type(layer).__name__
        raise NoSplit(f"transformers' plan splits {path} as a linear layer, but it is a {other}")
    others = layer._parameters.keys() - placements.keys()
    if style is Experts and others:
        missing = ", ".join(sorted(others))
        raise NoSplit(f"transformers' plan has no rule for {missing} of {path}")
    return style


def _layers_by_words(module: Any) -> dict[str, Layer]:
    """Return embeddings and head if they are plain layers: they are split along the vocabulary."""
    embeddings, head = _body(module).get_input_embeddings(), module.get_output_embeddings()
    ends: list[tuple[Any, type[WholeLayer], type]] = [(embeddings, VocabularyRows, nn.Embedding)]
    if len(getattr(head, "base_layer", head).weight) > 1:  # a scalar head has no vocabulary
        ends.append((head, ColumnLinear, nn.Linear))
    if not all(isinstance(getattr(end, "base_layer", end), kind) for end, _, kind in ends):
        return {}
    paths = {id(layer): path for path, layer in module.named_modules()}
    layers: dict[str, Layer] = {}
    for end, style, _ in ends:
        layers |= _with_adapter(paths[id(end)], end, style, {})
    return layers


def _with_adapter(
    path: str, layer: Any, style: type[WholeLayer], placements: Mapping[str, Placement]
) -> dict[str, Layer]:
    """Return the layer, or with LoRA its base and factors.

    B is split like the base's outputs, and A like its inputs. If the inputs are split, the rank's
    outputs of the adapter and the base are summed over ranks together, so B gets partial outputs of
    A.
    """
    if not hasattr(layer, "base_layer"):
        return {path: Layer(style, placements)}
    (adapter,) = layer.lora_A
    base, a, b = (
        f"{path}.{part}" for part in ("base_layer", f"lora_A.{adapter}", f"lora_B.{adapter}")
    )
    if issubclass(style, RowLinear):
        inputs = Layer(WholeLayer, {"weight": Shard(-1)})
        return {path: Layer(style), base: inputs, a: inputs, b: Layer(PartialWeights)}
    return {base: Layer(style), a: Layer(), b: Layer(style)}


def _reject_unused(module: Any, plan: Mapping[str, str], layers: Mapping[str, Layer]) -> None:
    """Reject rules for layers that the model does not have, unless other layers replace them.

    A plan for a mixture of experts can have rules for layers without experts, which may be absent.
    """
    paths, used = [], set()
    for path, layer in module.named_modules():
        parameters = getattr(layer, "base_layer", layer)._parameters
        paths.append(path)
        used |= {_rule_for(name) for name in (path, *(f"{path}.{name}" for name in parameters))}
    prefix = f"{module.base_model_prefix}."
    for rule in [rule for rule in plan if rule.startswith(prefix) and rule not in used]:
        place, matches = rule, list[str]()
        while "*" in place and not matches:
            pattern = re.compile(re.escape(place).replace(r"\*", r"\d+"))
            matches = [path for path in paths if pattern.fullmatch(path)]
            if not matches:
                place = place.rpartition(".")[0]
        is_other = "*" in place and all(any(f"{p}." in cut for cut in layers) for p in matches)
        if not is_other:
            raise NoSplit(
                f"transformers' plan has a rule for {rule}, which matches no layer of "
                f"{type(module).__name__}"
            )


def _siblings_without_rule(
    module: Any, parent: str, layers: Mapping[str, Layer]
) -> dict[str, Layer]:
    """Return the layers next to column-split layers for which the plan has no rule.

    Such layers may get only a part of the states; without summing, their gradients would be wrong.
    """
    others = {}
    for name, _ in module.get_submodule(parent).named_parameters():
        child, path = name.partition(".")[0], f"{parent}.{name}".rpartition(".")[0]
        parts = path.split(".")
        around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        if any(above in layers and above != parent for above in around):
            continue
        if path == parent and parent in layers and child in layers[parent].placements:
            continue
        if HEAD_NORM.fullmatch(child):
            others[path] = Layer(PartialWeights)
        elif not LOW_RANK_LAYERS.fullmatch(child):
            raise NoSplit(
                f"the tensor-parallel plan in transformers has no rule for {parent}.{name}, but "
                "splits layers next to it"
            )
    return others


def sizes(module: Any, layers: Mapping[str, Layer]) -> dict[str, int]:
    """Return the sizes that tp must divide, by name: heads, and split dims except vocabularies."""
    config = module.config.get_text_config()
    divisible: dict[str, int] = {}
    if any("att" in path and layer.style is ColumnLinear for path, layer in layers.items()):
        differ = getattr(config, "is_heterogeneous", False)
        configs = config.per_layer_config if differ else [config]
        heads = [layer.num_attention_heads for layer in configs]
        groups = [getattr(layer, "num_key_value_heads", None) for layer in configs]
        divisible["attention heads"] = math.gcd(*heads)
        divisible["key-value heads"] = math.gcd(
            *(a or b for a, b in zip(groups, heads, strict=True))
        )
    words = {id(_body(module).get_input_embeddings()), id(module.get_output_embeddings())}
    for layer, name, weight, placement in _split_weights(module, layers):
        if id(layer) not in words:
            num_blocks = getattr(placement, "split_factor", 1)
            of_layers = re.sub(r"\.\d+(?=\.)", "", name)
            size = weight.shape[placement.dim] // num_blocks
            divisible[f"dimension {placement.dim} of {of_layers}"] = size
    return divisible


def cut_weights(module: Any) -> set[int]:
    """Return the ids of the parameters that would be split over the ranks."""
    return {id(weight) for _, _, weight, _ in _split_weights(module, layers_of(module))}


def _split_weights(
    module: Any, layers: Mapping[str, Layer]
) -> Iterator[tuple[nn.Module, str, Tensor, Any]]:
    """Yield the layer, name, weight and placement of the parameters that are split."""
    for path, rule in layers.items():
        layer = module.get_submodule(path)
        for name, weight in layer._parameters.items():
            if weight is not None:
                placement = rule.placement(name, weight)
                if not isinstance(placement, Replicate):
                    yield layer, f"{path}.{name}", weight, placement


def check_split(module: Any, tp: int, key: str) -> None:
    """Reject a module, possibly on the meta device, that cannot be split over `tp` ranks."""
    try:
        needed = sizes(module, layers_of(module))
    except NoSplit as error:
        raise ConfigError(f"{key}={tp}: {error}. Set {key}=1, and shard with fsdp.") from error
    wrong = [f"{name} ({size})" for name, size in needed.items() if size % tp]
    if wrong:
        most = math.gcd(*needed.values())
        fits = [str(size) for size in range(1, most + 1) if most % size == 0]
        raise ConfigError(
            f"{key}={tp} does not divide {', '.join(wrong[:2])} of {module.config.model_type}; "
            f"sizes that do: {', '.join(fits)}."
        )
