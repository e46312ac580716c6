"""A model cut into stages of layers, each computed by the class's own forward pass.

    ranges = stage_ranges(module, num_stages)   # the layers of every stage, from shapes
    stages = Stages(module, ranges)
    stages.keep(own)                            # without other stages' parts, before weights
    with stages.computing(stage, received):     # states of the stage before; none for the first
        states = module(**inputs)               # of the last stage: what the module gives

Names and numbers of layers stay those of the whole model. What belongs to another stage gives on
what it gets, and embeddings give what the stage before has sent. Whether that is right for a class
of models is proven on a small one (`workers.training.parts.stage_check`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from workers.config.passes import LARGEST_PASS
from workers.parallel.experts import experts_of

LARGEST_LOGITS = 256 * 2**20
"""Bytes that the logits of a chunk of positions take, in float32."""
TRAINED, FROZEN = 4, 1
"""Numbers that are kept for a weight: with a gradient and two moments, and alone."""


class NoStages(Exception):
    """Why a model has no stages."""


@dataclass(frozen=True)
class StageParts:
    """What stages are made of; a part is the module that has it, and its name there."""

    embeddings: tuple[nn.Module, str]
    layers: nn.ModuleList
    ends: list[tuple[nn.Module, str]]
    """The last norm and the head."""
    is_tied: bool
    """Whether the head's weight is that of the embeddings."""

    @classmethod
    def of(cls, module: Any) -> StageParts:
        """A NoStages says what the module has elsewhere."""
        body = getattr(module, module.base_model_prefix)
        children, embeddings = dict(body.named_children()), body.get_input_embeddings()
        [*tables] = (name for name, child in children.items() if child is embeddings)
        [*lists] = (name for name, child in children.items() if _is_list_of_layers(child))
        if len(tables) != 1 or len(lists) != 1:
            raise NoStages(
                "its class keeps embeddings and layers otherwise than as a table and list"
            )
        weighty = [name for name, child in children.items() if _has_weights(child)]
        end = weighty.index(lists[0])
        others = [name for name in weighty[:end] if name != tables[0]]
        for owner in (body, module):
            others += owner._parameters.keys()
            others += owner._buffers.keys() - owner._non_persistent_buffers_set
        if others:
            raise NoStages(f"it has {', '.join(others)} beside embeddings and layers")
        after = [name for name in weighty[end + 1 :] if name != tables[0]]
        ends: list[tuple[nn.Module, str]] = [(body, name) for name in after]
        ends += [(module, name) for name, child in module.named_children() if child is not body]

        layers: Any = children[lists[0]]
        units = [("embeddings", embeddings), *(("end", owner._modules[n]) for owner, n in ends)]
        units += [(f"layer {number}", layer) for number, layer in enumerate(layers)]
        owners: dict[int, set[str]] = {}
        for what, unit in units:
            for weight in unit.parameters():
                owners.setdefault(id(weight), set()).add(what)
        shared = {frozenset(those) for those in owners.values() if len(those) > 1}
        is_tied = frozenset(("embeddings", "end")) in shared
        if len(shared) > is_tied:
            raise NoStages("its layers share weights")
        return cls((body, tables[0]), layers, ends, is_tied)


def _is_list_of_layers(child: nn.Module) -> bool:
    return isinstance(child, nn.ModuleList) and _has_weights(child)


def _has_weights(child: nn.Module) -> bool:
    """Parameters, or buffers that a folder of weights holds."""
    return bool(child.state_dict())


def stage_ranges(module: Any, num_stages: int, ep: int = 1) -> list[range]:
    """The layers of every stage, so that the largest takes the least memory.

    Weights count with gradients and moments, where they are trained, embeddings in the first stage
    and the head in the last, with the logits of its largest chunk. Of experts a rank has a part.
    Where anything is trained, what layers keep of one pass counts, too.
    """
    parts = StageParts.of(module)
    if num_stages > len(parts.layers):
        raise NoStages(f"it has {len(parts.layers)} layers, and {num_stages} stages")
    spread = {id(w) for _, each in experts_of(module) for w in each.parameters()} if ep > 1 else ()

    def kept(part: nn.Module) -> float:
        return sum(
            w.numel() * (TRAINED if w.requires_grad else FROZEN) / (ep if id(w) in spread else 1)
            for w in part.parameters()
        )

    config = module.config.get_text_config()
    trains = any(weight.requires_grad for weight in module.parameters())
    num_tokens = min(getattr(config, "max_position_embeddings", 0) or LARGEST_PASS, LARGEST_PASS)
    num_chosen = getattr(config, "num_experts_per_tok", None) or 1

    def of_pass(layer: nn.Module) -> int:
        """Inputs and outputs of its matrices, of experts those of the chosen ones."""
        matrices = [weight.shape for weight in layer.parameters() if weight.ndim > 1]
        per_token = sum(sum(s[-2:]) * (num_chosen if len(s) == 3 else 1) for s in matrices)
        return num_tokens * per_token * trains

    owner, name = parts.embeddings
    first, last = kept(owner._modules[name]), 0.0  # type: ignore[arg-type]
    for owner, name in parts.ends:
        last += kept(owner._modules[name])  # type: ignore[arg-type]
    head = module.get_output_embeddings()
    if (words := len(getattr(head, "base_layer", head).weight)) > 1:
        last += min(words * num_tokens, LARGEST_LOGITS // 4)
    costs = [kept(layer) + of_pass(layer) for layer in parts.layers]
    return deal(costs, first, last, num_stages)


def deal(costs: Sequence[float], first: float, last: float, num_stages: int) -> list[range]:
    """Neighbours together, so that the largest stage is the smallest, and the others alike."""
    sums = [0.0, *itertools.accumulate(costs)]
    count = len(costs)

    def size(stage: int, begin: int, end: int) -> float:
        ends = first * (stage == 0) + last * (stage == num_stages - 1)
        return sums[end] - sums[begin] + ends

    def best(limit: float, power: int) -> tuple[float, list[int]]:
        """The least sum of sizes to this power, or largest size, and where the stages begin."""
        found: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
        for stage in range(num_stages):
            ended: dict[int, tuple[float, list[int]]] = {}
            for end in range(stage + 1, count - (num_stages - 1 - stage) + 1):
                for begin, (before, begins) in found.items():
                    own = size(stage, begin, end)
                    if begin < end and own <= limit:
                        total = before + own**power if power else max(before, own)
                        if end not in ended or total < ended[end][0]:
                            ended[end] = total, [*begins, begin]
            found = ended
        return found[count]

    largest, _ = best(float("inf"), 0)
    _, begins = best(largest, 2)
    return [range(*both) for both in itertools.pairwise([*begins, count])]


class Pass(nn.Module):
    """Stands for a part of another stage: states go on as they are."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        for name, value in vars(part).items():  # what the forward pass asks of a layer: its kind
            if name not in vars(self) and isinstance(value, str | float | int | None):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """They go on."""
        return hidden_states


class Received(nn.Module):
    """Stands for the embeddings: gives what the stage before has sent, pass after pass."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.num_embeddings = embeddings.num_embeddings
        self.states: list[Tensor] = []

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """The next one."""
        return self.states.pop(0)


@dataclass(frozen=True)
class Place:
    """Where a part stands, or what stands for it in stages that do not compute it."""

    owner: nn.Module
    name: str
    other: nn.Module
    used: frozenset[int]
    """Stages that compute it."""
    held: frozenset[int]
    """Stages that have its weights."""

    def put(self, part: nn.Module | None) -> None:
        self.owner._modules[self.name] = part


class Stages:
    """The stages of a module, of which this rank computes some."""

    def __init__(self, module: Any, ranges: Sequence[range]) -> None:
        self.module, self.last = module, len(ranges) - 1
        self.body = getattr(module, module.base_model_prefix)
        parts = StageParts.of(module)
        owner, name = parts.embeddings
        self.received = Received(owner._modules[name])
        first, last = frozenset((0,)), frozenset((self.last,))
        # a head with the weights of the embeddings has them at hand, under their name
        held = first | last if parts.is_tied else first
        self.places = [Place(owner, name, self.received, first, held)]
        for stage, numbers in enumerate(ranges):
            for number in numbers:
                other, own = Pass(parts.layers[number]), frozenset((stage,))
                self.places.append(Place(parts.layers, str(number), other, own, own))
        for owner, name in parts.ends:
            other = Pass(owner._modules[name])  # type: ignore[arg-type]
            self.places.append(Place(owner, name, other, last, last))
        self.is_tied = parts.is_tied
        self.tied_to: str | None = None
        """Where this rank has a copy of the embeddings, the name of their weight."""

    def weights(self, own: Sequence[int]) -> set[int]:
        """The ids of those that these stages have."""
        here = (place for place in self.places if not place.held.isdisjoint(own))
        parts: list[Any] = [place.owner._modules[place.name] for place in here]
        return {id(weight) for part in parts for weight in part.parameters()}

    def keep(self, own: Sequence[int]) -> None:
        """The parts of these stages alone, and their weights."""
        table = self.places[0]
        for place in self.places:
            if place.held.isdisjoint(own):
                place.put(place.other)
        if self.is_tied and not {0, self.last}.isdisjoint(own):
            weight = next(table.owner._modules[table.name].parameters())  # type: ignore[union-attr]
            names = (name for name, one in self.module.named_parameters() if one is weight)
            self.tied_to = next(names)

    @contextmanager
    def computing(self, stage: int, received: Sequence[Tensor] = ()) -> Iterator[None]:
        """Within, the module's forward pass is the stage's; those before the last give states."""
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
