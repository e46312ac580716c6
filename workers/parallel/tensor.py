"""Tensor parallelism: the layers of a model cut over the ranks of the mesh axis "tp".

    cut = apply(module, mesh["tp"])     # before FSDP2 shards it over other axes, and before weights
    ...                                 # forward and backward passes of a mini-batch
    cut.add_up_gradients()              # of weights that saw a part of the heads

Which layers are cut, and how, transformers says in the plans of its configs and classes. They are
read as data: what transformers applies them by differs from version to version. The ranks of the
axis hold the same rows. Hidden states between layers are whole on all of them; a layer cut by
columns computes some of its outputs from whole inputs, one cut by rows takes these and adds its
outputs up over the ranks: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053).

Every parameter becomes a DTensor. The layers compute with its local part, so that their kernels are
those of a plain module. Embeddings and head are cut by words whatever the plan says; the head's
logits stay so (`workers.parallel.vocabulary`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
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
from workers.parallel.placements import local_part
from workers.parallel.vocabulary import Words

COPY = "_copy_for_cut_layers"
"""Attribute of hidden states: the copy of them that layers cut by columns share."""
HEAD_NORM = re.compile(r"(q|k|v|query|key)_?(norm|layernorm)")
"""Norms of heads: their weights are whole, and see the heads of this rank alone."""
BEFORE_HEADS = re.compile(r"(q|kv)_a_(proj.*|layernorm)")
"""Layers of latent attention that compute what all heads share."""

USE_OTHERS = ("gemma3n", "gemma4")
"""How types of models begin whose layers use weights of others, as those with convolutions do."""


class _Copied(torch.autograd.Function):
    """Whole states go into cut layers, whose gradients are added up over the ranks."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return states.data  # a view would hold the states, and these hold it: both would stay

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _AddedUp(torch.autograd.Function):
    """Parts of a sum become the whole; the gradient of each is the whole's."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    """Columns of all ranks become the whole; what follows is computed alike on every rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_columns(grad, ctx.group), None


class _Split(torch.autograd.Function):
    """The rank's columns of the whole; the inverse of `_Gathered`."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_columns(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


def _sum(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim=-1)


def _own_columns(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(group.size(), dim=-1)[group.rank()].contiguous()


class Whole:
    """A layer that every rank computes alike; the base of the others, one object a layer."""

    partial = False
    """Whether a rank's gradients of the weights are parts of their sum."""

    def __init__(self, group: dist.ProcessGroup, config: Any) -> None:
        self.group, self.config = group, config

    @classmethod
    def placement(cls, name: str) -> Placement:
        """Where the parameter `name` of the layer is cut."""
        return Replicate()

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the positional arguments that the layer computes with."""
        return inputs

    def leave(self, output: Any) -> Any:
        """Return the layer's output for the other layers."""
        return output

    def restore(self, layer: Any) -> None:
        """Undo in the end what `enter` changed of the layer, also after an error."""

    def copied(self, states: Tensor) -> Tensor:
        """Layers that take the same states share one copy, whose gradient is added up once."""
        if not (torch.is_grad_enabled() and states.requires_grad):
            return states
        copy: Tensor | None = getattr(states, COPY, None)
        if copy is None:
            copy = _Copied.apply(states, self.group)
            setattr(states, COPY, copy)
        return copy

    def added_up(self, part: Tensor) -> Tensor:
        """The sum over the ranks."""
        total: Tensor = _AddedUp.apply(part, self.group)
        return total


class PartialWeights(Whole):
    """Weights that see a part of what they are multiplied with: a norm of the rank's heads."""

    partial = True


class ColumnLinear(Whole):
    """A linear layer of which the rank computes some outputs."""

    @classmethod
    def placement(cls, name: str) -> Placement:
        """Outputs are cut."""
        return Shard(0)

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Whole states."""
        return (self.copied(inputs[0]), *inputs[1:])


class GatheredColumnLinear(ColumnLinear):
    """The same, its outputs gathered, where the model cuts or norms them in another way."""

    def leave(self, output: Any) -> Any:
        """Return whole states."""
        return _Gathered.apply(output, self.group)


class RowLinear(Whole):
    """A linear layer that takes the rank's columns; its outputs are added up.

    The bias is added to the sum. A layer with an adapter is summed with it.
    """

    @classmethod
    def placement(cls, name: str) -> Placement:
        """Inputs are cut."""
        return Shard(1) if name == "weight" else Replicate()

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take the rank's columns; leave out the bias."""
        own = getattr(layer, "base_layer", layer)._parameters
        self.bias, own["bias"] = own["bias"], None
        return inputs

    def restore(self, layer: Any) -> None:
        """Put the bias back."""
        getattr(layer, "base_layer", layer)._parameters["bias"] = self.bias

    def leave(self, output: Any) -> Any:
        """Return whole states, with the bias."""
        total = self.added_up(output)
        return total if self.bias is None else total + local_part(self.bias)


class SplitRowLinear(RowLinear):
    """The same, of whole states."""

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The rank's columns of whole states."""
        return super().enter(layer, (_Split.apply(inputs[0], self.group), *inputs[1:]))


class VocabularyRows(Whole):
    """Embeddings of the rank's words; a token has its own from one rank, and zeros from others."""

    @classmethod
    def placement(cls, name: str) -> Placement:
        """Words are cut."""
        return Shard(0)

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Places among the rank's words."""
        words = Words.of(layer.num_embeddings, self.group)
        ids, self.is_other = words.places(inputs[0])
        return (ids, *inputs[1:])

    def leave(self, output: Any) -> Any:
        """Return whole states."""
        return self.added_up(output.masked_fill(self.is_other[..., None], 0.0))


class Experts(Whole):
    """Experts of which every rank has a part; their outputs are added up."""

    def enter(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Whole states and the router's choices, whose weights get gradients from all ranks."""
        states, choices, weights = inputs
        return self.copied(states), choices, self.copied(weights)

    def leave(self, output: Any) -> Any:
        """Return whole states."""
        return self.added_up(output)


class LatentKeys(Whole):
    """Latent attention's first layer: the rotary part of its output goes to the heads directly."""

    def leave(self, output: Any) -> Any:
        """Have the rotary part get gradients from all heads."""
        size = self.config.qk_rope_head_dim
        latent, rotary = output.split([output.shape[-1] - size, size], dim=-1)
        return torch.cat([latent, self.copied(rotary)], dim=-1)


STYLES: dict[str, type[Whole]] = {
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
"""What transformers calls them, over its versions, of layers."""
PLACEMENTS: dict[str, Placement] = {
    "colwise": Shard(-2),
    "rowwise": Shard(-1),
    "packed_colwise": _StridedShard(-2, split_factor=2),
}
"""The same of single parameters, such as all experts' together. Packed ones are two, end to end."""


@dataclass(frozen=True)
class Layer:
    """How a layer is computed, and where those of its parameters are cut that have own rules."""

    style: type[Whole] = Whole
    placements: Mapping[str, Placement] = field(default_factory=dict)

    def placement(self, name: str, weight: Tensor) -> Placement:
        """Where its parameter `name` is cut."""
        found = self.placements.get(name, self.style.placement(name))
        if isinstance(found, _StridedShard):
            return _StridedShard(found.dim % weight.ndim, split_factor=found.split_factor)
        return Shard(found.dim % weight.ndim) if isinstance(found, Shard) else found


@dataclass(frozen=True)
class Cut:
    """How a module lies over the ranks of one axis."""

    group: dist.ProcessGroup
    partial: list[tuple[nn.Module, str]]
    """Layers and names of parameters whose gradients are parts of their sums."""
    words: Words | None
    """Those that the rank's head gives logits of; None where it gives all."""

    def keep_here(self, module: nn.Module) -> None:
        """Forget the layers that are no longer in the module."""
        here = {id(child) for child in module.modules()}
        self.partial[:] = [pair for pair in self.partial if id(pair[0]) in here]

    def add_up_gradients(self) -> None:
        """Add up over the ranks what each has of partial gradients; once a mini-batch."""
        weights = [getattr(layer, name) for layer, name in self.partial]
        add_up_gradients([weight for weight in weights if weight.requires_grad], self.group)


def apply(module: Any, mesh: DeviceMesh) -> Cut:
    """Cut the module's parameters over the one axis of `mesh`, and have layers compute so.

    Adapters are there already, memory for weights need not be. `check` says whether it can be.
    """
    group, config = mesh.get_group(), module.config.get_text_config()
    layers = layers_of(module)
    made: dict[int, nn.Parameter] = {}
    partial = []
    for path, layer in module.named_modules():
        found = layers.get(path, Layer(Whole))
        style = found.style(group, config)
        for name, weight in layer._parameters.items():
            if weight is None:
                continue
            placement = found.placement(name, weight)
            own = made.setdefault(id(weight), _distributed(weight, mesh, placement))
            assert own.data.placements == (placement,), f"{path}.{name} is tied, and cut otherwise"
            layer._parameters[name] = own
            if style.partial:
                partial.append((layer, name))
        if layer._parameters or found.style is not Whole:
            _hook(layer, style)

    embeddings = _body(module).get_input_embeddings()
    if getattr(embeddings, "padding_idx", None) is not None:  # whose gradient torch leaves out
        words, token = Words.of(embeddings.num_embeddings, group), embeddings.padding_idx
        embeddings.padding_idx = token - words.first if words.has(token) else None
    return Cut(group, partial, _words_of_head(module, group))


def _words_of_head(module: Any, group: dist.ProcessGroup) -> Words | None:
    head = module.get_output_embeddings()
    weight = getattr(head, "base_layer", head).weight
    is_cut = isinstance(weight, DTensor) and weight.placements == (Shard(0),)
    return Words.of(len(weight), group) if is_cut else None


def _body(module: Any) -> Any:
    """The base model under its head."""
    return getattr(module, module.base_model_prefix)


def _hook(layer: nn.Module, style: Whole) -> None:
    """Have the layer compute with the local parts of its parameters, as `style` says."""
    whole: dict[str, Any] = {}

    def before(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs = style.enter(layer, inputs)
        for name, weight in layer._parameters.items():
            if isinstance(weight, DTensor):
                whole[name] = weight
        layer._parameters.update({name: weight.to_local() for name, weight in whole.items()})
        return inputs

    def after(layer: Any, _inputs: Any, output: Any) -> Any:
        layer._parameters.update(whole)
        whole.clear()
        style.restore(layer)
        return None if output is None else style.leave(output)  # None after an error

    layer.register_forward_pre_hook(before)
    # checkpointed layers are left by an exception when all that was asked is computed again
    layer.register_forward_hook(after, always_call=True)


def _distributed(weight: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """The weight as a DTensor, its local part cut from it."""
    part = weight.detach()
    if not isinstance(placement, Replicate):
        dim, count = placement.dim, mesh.size()
        pieces = part.chunk(getattr(placement, "split_factor", 1), dim)
        cuts = [_own_cut(piece, dim, count, mesh.get_local_rank()) for piece in pieces]
        part = torch.cat(cuts, dim)
    whole = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return nn.Parameter(whole, requires_grad=weight.requires_grad)


def _own_cut(tensor: Tensor, dim: int, count: int, rank: int) -> Tensor:
    most = -(-tensor.shape[dim] // count)
    first = min(rank * most, tensor.shape[dim])
    return tensor.narrow(dim, first, min(most, tensor.shape[dim] - first))


def plan_of(module: Any) -> dict[str, str]:
    """Names of layers and parameters, `*` being a number -> transformers' name of their style."""
    own = getattr(module, "_tp_plan", None)
    if own is not None:
        return dict(own)
    own = getattr(_body(module), "_tp_plan", None) or {}  # a scalar head's has no class of its own
    return {f"{module.base_model_prefix}.{name}": style for name, style in own.items()}


class NotCut(ValueError):
    """Why tensor parallelism cannot cut a model; the text begins a sentence's second half."""


def layers_of(module: Any) -> dict[str, Layer]:
    """How layers are computed, by name; those that are not named are whole on every rank."""
    plan = plan_of(module)
    prefix = f"{module.base_model_prefix}."
    if not any(name.startswith(prefix) for name in plan):
        raise NotCut(f"transformers has no tensor parallel plan for {module.config.model_type}")
    is_known = module.config.model_type.startswith(USE_OTHERS)
    if is_known or any(isinstance(layer, nn.Conv1d) for layer in module.modules()):
        raise NotCut(f"layers of {module.config.model_type} compute with weights of other layers")

    used: set[str] = set()

    def style_of(name: str) -> str | None:
        rule = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        used.update({rule} & plan.keys())
        return plan.get(rule)

    found: dict[str, Layer] = {}
    columns: list[str] = []
    for path, layer in module.named_modules():
        base = getattr(layer, "base_layer", layer)
        names = {name: style_of(f"{path}.{name}") for name in base._parameters}
        own = {name: _placement(style, path) for name, style in names.items() if style is not None}
        style = style_of(path)
        if style is not None:
            kind = _style(style, path, base, own)
            found |= _with_adapter(path, layer, kind, own)
            columns += [path] if kind is ColumnLinear else []
        elif own:
            found[path] = Layer(Whole, own)

    embeddings, head = _body(module).get_input_embeddings(), module.get_output_embeddings()
    ends: list[tuple[Any, type[Whole], type]] = [(embeddings, VocabularyRows, nn.Embedding)]
    if len(getattr(head, "base_layer", head).weight) > 1:  # a scalar head has no words
        ends.append((head, ColumnLinear, nn.Linear))
    if all(isinstance(getattr(end, "base_layer", end), kind) for end, _, kind in ends):
        paths = {id(layer): path for path, layer in module.named_modules()}
        for end, style_of_words, _ in ends:
            found |= _with_adapter(paths[id(end)], end, style_of_words, {})

    unused = [rule for rule in plan if rule.startswith(prefix) and rule not in used]
    _refuse_unused(module, unused, found)
    for path in columns:
        found |= _beside(module, path.rpartition(".")[0], found)
    return found


def _style(name: str, path: str, layer: Any, placements: Mapping[str, Placement]) -> type[Whole]:
    style = STYLES.get(name)
    if style is None:
        raise NotCut(f"the plan cuts {path} in a way that is not known here: {name}")
    if issubclass(style, ColumnLinear | RowLinear) and not isinstance(layer, nn.Linear):
        raise NotCut(f"the plan cuts {path} as a linear layer, and it is a {type(layer).__name__}")
    if style is Experts and (others := layer._parameters.keys() - placements.keys()):
        raise NotCut(f"the plan has no rule for {', '.join(sorted(others))} of {path}")
    return style


def _placement(style: str, path: str) -> Placement:
    if style not in PLACEMENTS:
        raise NotCut(f"the plan cuts weights of {path} in a way that is not known here: {style}")
    return PLACEMENTS[style]


def _with_adapter(
    path: str, layer: Any, style: type[Whole], placements: Mapping[str, Placement]
) -> dict[str, Layer]:
    """The layer, or with LoRA the layers that it consists of.

    B has the base's outputs, and A its inputs. Where inputs are cut, the adapter's part of the sum
    joins the base's, so that B sees a part of what A computes.
    """
    if not hasattr(layer, "base_layer"):
        return {path: Layer(style, placements)}
    (adapter,) = layer.lora_A
    base, a, b = (
        f"{path}.{part}" for part in ("base_layer", f"lora_A.{adapter}", f"lora_B.{adapter}")
    )
    if issubclass(style, RowLinear):
        inputs = Layer(Whole, {"weight": Shard(-1)})
        return {path: Layer(style), base: inputs, a: inputs, b: Layer(PartialWeights)}
    return {base: Layer(style), a: Layer(), b: Layer(style)}


def _refuse_unused(module: Any, rules: Sequence[str], found: Mapping[str, Layer]) -> None:
    """Refuse rules of layers that the model does not have, unless it has others in their place.

    Layers are of different kinds: of a mixture's rules some are for those that have no experts.
    """
    paths = [path for path, _ in module.named_modules()]
    for rule in rules:
        place = rule
        while "*" in place and not (there := _matching(place, paths)):
            place = place.rpartition(".")[0]
        is_other = "*" in place and all(any(f"{p}." in cut for cut in found) for p in there)
        if not is_other:
            raise NotCut(f"the plan's rule {rule} matches no layer of {type(module).__name__}")


def _and_above(path: str) -> Iterator[str]:
    """A module's path and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _matching(rule: str, paths: Sequence[str]) -> list[str]:
    pattern = re.compile(re.escape(rule).replace(r"\*", r"\d+"))
    return [path for path in paths if pattern.fullmatch(path)]


def _beside(module: Any, parent: str, found: Mapping[str, Layer]) -> dict[str, Layer]:
    """Layers beside those that are cut by columns, for which the plan has no rule.

    What they see may be a part: a gradient that is not added up would be wrong without a word.
    """
    others = {}
    for name, _ in module.get_submodule(parent).named_parameters():
        child, path = name.partition(".")[0], f"{parent}.{name}".rpartition(".")[0]
        if any(above in found and above != parent for above in _and_above(path)):
            continue
        if path == parent and parent in found and child in found[parent].placements:
            continue
        if HEAD_NORM.fullmatch(child):
            others[path] = Layer(PartialWeights)
        elif not BEFORE_HEADS.fullmatch(child):
            raise NotCut(f"the plan has no rule for {parent}.{name} beside layers that it cuts")
    return others


def sizes(module: Any, layers: Mapping[str, Layer]) -> dict[str, int]:
    """What the ranks must divide, by name: heads, and the cut dims of weights but for words."""
    config = module.config.get_text_config()
    found: dict[str, int] = {}
    if any("att" in path and layer.style is ColumnLinear for path, layer in layers.items()):
        heads = config.num_attention_heads
        found["attention heads"] = heads
        found["key-value heads"] = getattr(config, "num_key_value_heads", None) or heads
    words = {id(_body(module).get_input_embeddings()), id(module.get_output_embeddings())}
    for path, layer in layers.items():
        child = module.get_submodule(path)
        for name, weight in child._parameters.items():
            if weight is not None and id(child) not in words:
                placement = layer.placement(name, weight)
                if not isinstance(placement, Replicate):
                    pieces = getattr(placement, "split_factor", 1)
                    what = re.sub(r"\.\d+(?=\.)", "", f"{path}.{name}")
                    found[f"dim {placement.dim} of {what}"] = weight.shape[placement.dim] // pieces
    return found


def cut_weights(module: Any) -> set[int]:
    """The ids of the parameters of which every rank would have a part."""
    layers = layers_of(module)
    found = set()
    for path, layer in module.named_modules():
        how = layers.get(path, Layer())
        for name, weight in layer._parameters.items():
            if weight is not None and not isinstance(how.placement(name, weight), Replicate):
                found.add(id(weight))
    return found


def check(module: Any, tp: int, key: str) -> None:
    """Refuse to cut a module, which may be on the meta device, over so many ranks."""
    try:
        needed = sizes(module, layers_of(module))
    except NotCut as error:
        raise ConfigError(f"{key}={tp}: {error}; set {key}=1, and shard with fsdp.") from error
    wrong = [f"{what} ({size})" for what, size in needed.items() if size % tp]
    if wrong:
        most = math.gcd(*needed.values())
        fits = [str(size) for size in range(1, most + 1) if most % size == 0]
        raise ConfigError(
            f"{key}={tp} does not divide {', '.join(wrong[:2])} of {module.config.model_type}; "
            f"sizes that do: {', '.join(fits)}."
        )
