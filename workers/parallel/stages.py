"""Split a model into stages of layers, each computed by the model class's own forward pass.

    ranges = stage_ranges(module, num_stages)   # the layers of every stage, from shapes
    stages = Stages(module, ranges)
    stages.keep(numbers)                        # drops other stages' parts, before loading weights
    with stages.computing(stage, received):     # received: states of the previous stage, if any
        states = module(**inputs)               # in the last stage, the model's outputs

Names and numbers of layers are those of the whole model. Parts of other stages return their inputs
unchanged, and embeddings return the states that the previous stage sent. This does not work for
every class (`workers.models.support`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from workers.config import LARGEST_PASS
from workers.parallel.fsdp import experts_of

LARGEST_LOGITS = 256 * 2**20
"""Bytes of the float32 logits of one chunk of positions (`passes/lm_head.py`); on a GPU,
chunks of a large vocabulary are larger.
"""
TRAINED, FROZEN = 4, 1
"""Numbers stored per weight: with a gradient and two moments, and without."""


class NoStages(Exception):
    """Raised if a model cannot be split into stages; the text is the reason."""


@dataclass(frozen=True)
class StageParts:
    """The modules that are divided into stages, each as (parent module, attribute name)."""

    embeddings: tuple[nn.Module, str]
    layers: nn.ModuleList
    ends: list[tuple[nn.Module, str]]
    """The last norm and the head."""
    is_tied: bool
    """True if the head shares the weight of the embeddings."""

    @classmethod
    def of(cls, module: Any) -> StageParts:
        """Find the parts; raise NoStages if the module is structured differently."""
        body = getattr(module, module.base_model_prefix, module)
        children, embeddings = dict(body.named_children()), body.get_input_embeddings()
        [*tables] = (name for name, child in children.items() if child is embeddings)
        [*lists] = (
            name
            for name, child in children.items()
            if isinstance(child, nn.ModuleList) and _has_weights(child)
        )
        if len(tables) != 1 or len(lists) != 1:
            raise NoStages("its class does not have one embedding table and one list of layers")
        weighty = [name for name, child in children.items() if _has_weights(child)]
        end = weighty.index(lists[0])
        others = [name for name in weighty[:end] if name != tables[0]]
        for owner in (body, module):
            others += owner._parameters.keys()
            others += owner._buffers.keys() - owner._non_persistent_buffers_set
        if others:
            raise NoStages(f"it has {', '.join(others)} outside of embeddings and layers")
        after = [name for name in weighty[end + 1 :] if name != tables[0]]
        ends: list[tuple[nn.Module, str]] = [(body, name) for name in after]
        ends += [(module, name) for name, child in module.named_children() if child is not body]

        layers: Any = children[lists[0]]
        units = [("embeddings", embeddings), *(("end", owner._modules[n]) for owner, n in ends)]
        units += [(f"layer {number}", layer) for number, layer in enumerate(layers)]
        owners: dict[int, set[str]] = {}
        for part, unit in units:
            for weight in unit.parameters():
                owners.setdefault(id(weight), set()).add(part)
        shared = {frozenset(names) for names in owners.values() if len(names) > 1}
        is_tied = frozenset(("embeddings", "end")) in shared
        if len(shared) > is_tied:
            raise NoStages("its layers share weights")
        return cls((body, tables[0]), layers, ends, is_tied)


def _has_weights(child: nn.Module) -> bool:
    """True if the module has parameters, or buffers that checkpoints store."""
    return bool(child.state_dict())


def stage_ranges(module: Any, num_stages: int, ep: int = 1) -> list[range]:
    """Return the layers of every stage, so that the largest stage needs the least memory.

    Trained weights count with their gradients and moments. The first stage has the embeddings, and
    the last stage has the head with the logits of its largest chunk. With `ep`, a rank has only
    some of the experts. If anything is trained, the tensors that layers save in one pass also
    count.
    """
    parts = StageParts.of(module)
    if num_stages > len(parts.layers):
        raise NoStages(
            f"it has {len(parts.layers)} layers, fewer than the {num_stages} pipeline stages"
        )
    spread = {id(w) for _, e in experts_of(module) for w in e.parameters()} if ep > 1 else ()

    def stored(part: nn.Module) -> float:
        num_bytes = 0.0
        for weight in part.parameters():
            per_number = TRAINED if weight.requires_grad else FROZEN
            num_ranks = ep if id(weight) in spread else 1
            num_bytes += weight.numel() * per_number / num_ranks
        return num_bytes

    config = module.config.get_text_config()
    trains = any(weight.requires_grad for weight in module.parameters())
    num_tokens = min(getattr(config, "max_position_embeddings", 0) or LARGEST_PASS, LARGEST_PASS)
    num_chosen = getattr(config, "num_experts_per_tok", None) or 1

    def of_pass(layer: nn.Module) -> int:
        """Count the inputs and outputs of a layer's matrices, only for experts that tokens use."""
        matrices = [weight.shape for weight in layer.parameters() if weight.ndim > 1]
        per_token = sum(sum(s[-2:]) * (num_chosen if len(s) == 3 else 1) for s in matrices)
        return num_tokens * per_token * trains

    owner, name = parts.embeddings
    first, last = stored(owner._modules[name]), 0.0  # type: ignore[arg-type]
    for owner, name in parts.ends:
        last += stored(owner._modules[name])  # type: ignore[arg-type]
    head = module.get_output_embeddings()
    words = len(getattr(head, "base_layer", head).weight)
    if words > 1:
        last += min(words * num_tokens, LARGEST_LOGITS // 4)
    costs = [stored(layer) + of_pass(layer) for layer in parts.layers]
    return deal(costs, first, last, num_stages)


def deal(costs: Sequence[float], first: float, last: float, num_stages: int) -> list[range]:
    """Divide consecutive layers into stages: minimize the largest, then balance the others."""
    sums = [0.0, *itertools.accumulate(costs)]
    count = len(costs)

    def size(stage: int, begin: int, end: int) -> float:
        ends = first * (stage == 0) + last * (stage == num_stages - 1)
        return sums[end] - sums[begin] + ends

    def best(limit: float, power: int) -> tuple[float, list[int]]:
        """Minimize the sum of the stages' costs to this power, or the largest cost if it is 0."""
        states: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
        for stage in range(num_stages):
            ended: dict[int, tuple[float, list[int]]] = {}
            for end in range(stage + 1, count - (num_stages - 1 - stage) + 1):
                for begin, (before, begins) in states.items():
                    cost = size(stage, begin, end)
                    if begin < end and cost <= limit:
                        total = before + cost**power if power else max(before, cost)
                        if end not in ended or total < ended[end][0]:
                            ended[end] = total, [*begins, begin]
            states = ended
        return states[count]

    largest, _ = best(float("inf"), 0)
    _, begins = best(largest, 2)
    return [range(*both) for both in itertools.pairwise([*begins, count])]


class Pass(nn.Module):
    """Replaces a module of another stage: returns the states unchanged."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        for name, value in vars(part).items():  # attributes that the model's forward pass reads
            if name not in vars(self) and isinstance(value, str | float | int | None):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the states unchanged."""
        return hidden_states


class Received(nn.Module):
    """Replaces the embeddings: each forward pass returns the next states of the previous stage."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.num_embeddings = embeddings.num_embeddings
        self.states: list[Tensor] = []

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return the states of the next pass."""
        return self.states.pop(0)


@dataclass(frozen=True)
class Place:
    """The position of a part, and its replacement in stages that do not compute it."""

    owner: nn.Module
    name: str
    other: nn.Module
    used: frozenset[int]
    """Stages that compute it."""
    stages: frozenset[int]
    """Stages that have its weights."""

    def put(self, part: nn.Module | None) -> None:
        self.owner._modules[self.name] = part


class Stages:
    """The stages of a module; this rank computes some of them."""

    def __init__(self, module: Any, ranges: Sequence[range]) -> None:
        self.module, self.last = module, len(ranges) - 1
        self.body = getattr(module, module.base_model_prefix, module)
        parts = StageParts.of(module)
        owner, name = parts.embeddings
        self.received = Received(owner._modules[name])
        first, last = frozenset((0,)), frozenset((self.last,))
        # a head that is tied to the embeddings stores their weights under the embeddings' name
        with_table = first | last if parts.is_tied else first
        self.places = [Place(owner, name, self.received, first, with_table)]
        for stage, numbers in enumerate(ranges):
            for number in numbers:
                other, only = Pass(parts.layers[number]), frozenset((stage,))
                self.places.append(Place(parts.layers, str(number), other, only, only))
        for owner, name in parts.ends:
            other = Pass(owner._modules[name])  # type: ignore[arg-type]
            self.places.append(Place(owner, name, other, last, last))
        self.is_tied = parts.is_tied
        self.tied_to: str | None = None
        """Name of the embeddings' weight if the head on this rank has a copy of it."""

    def weights(self, numbers: Sequence[int]) -> set[int]:
        """Return the ids of the weights of these stages."""
        here = (place for place in self.places if not place.stages.isdisjoint(numbers))
        parts: list[Any] = [place.owner._modules[place.name] for place in here]
        return {id(weight) for part in parts for weight in part.parameters()}

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep only the parts and weights of these stages."""
        table = self.places[0]
        for place in self.places:
            if place.stages.isdisjoint(numbers):
                place.put(place.other)
        if self.is_tied and not {0, self.last}.isdisjoint(numbers):
            weight = next(table.owner._modules[table.name].parameters())  # type: ignore[union-attr]
            names = (name for name, w in self.module.named_parameters() if w is weight)
            self.tied_to = next(names)

    @contextmanager
    def computing(self, stage: int, received: Sequence[Tensor] = ()) -> Iterator[None]:
        """Context in which the module computes the stage.

        The module returns the states for the next stage, or in the last stage its outputs.
        """
        before = [place.owner._modules[place.name] for place in self.places]
        for place in self.places:
            if stage not in place.used:
                place.put(place.other)
        self.received.states = list(received)
        if stage < self.last:
            self.module.forward = self._states
        try:
            yield
        finally:
            vars(self.module).pop("forward", None)
            self.received.states = []
            for place, part in zip(self.places, before, strict=True):
                place.put(part)

    def _states(self, **inputs: Any) -> Tensor:
        states: Tensor = self.body(**inputs).last_hidden_state
        return states
