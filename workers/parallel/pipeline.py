"""Pipeline parallelism: stages of layers, their passes in order, and the states between them.

Each stage is computed by the model class's own forward pass:

    ranges = stage_ranges(module, num_stages)   # the layers of every stage, from shapes
    stages = Stages(module, ranges)
    stages.keep(numbers)                        # drops other stages' parts, before loading weights
    with stages.computing(stage, received):     # received: states of the previous stage, if any
        states = module(**inputs)               # in the last stage, the model's outputs

Names and numbers of layers are those of the whole model. Parts of other stages return their inputs
unchanged, and embeddings return the states that the previous stage sent. This does not work for
every class (`workers.models.support`).

    for action in pipeline.actions(num_passes):         # one stage: F0 B0 F1 B1 ...
        if action.is_forward:
            with pipeline.computing(action, shapes) as results:     # receives states first
                results += [module(**inputs)]                       # sends them at the end
        else:
            pipeline.backward(action)

The ranks along "pp" form a line. They have the same rows and split them into the same passes, so
each rank knows the shapes that it receives, even if passes have different lengths. Gradients are
accumulated in the order of the passes, as in one process. A send does not block. A receive blocks.
Each direction and neighbor has a separate group, so no two ranks wait for each other, and states
arrive in the order in which they were sent.

gpipe: all forward passes first (arXiv 1811.06965). 1f1b: only as many as keep all ranks busy
(PipeDream-Flush, arXiv 2006.09503). interleaved: 1f1b over two stages per rank, which halves the
idle time (arXiv 2104.04473).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_like.errors import ConfigError
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


class PassThrough(nn.Module):
    """Replaces a module of another stage: returns the states unchanged."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        for name, value in vars(part).items():  # attributes that the model's forward pass reads
            if name not in vars(self) and isinstance(value, str | float | int | None):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the states unchanged."""
        return hidden_states


class ReceivedStates(nn.Module):
    """Replaces the embeddings: each forward pass returns the next states of the previous stage."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.num_embeddings = embeddings.num_embeddings
        self.states: list[Tensor] = []

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return the states of the next pass."""
        return self.states.pop(0)


@dataclass(frozen=True)
class StagePart:
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
        self.received = ReceivedStates(owner._modules[name])
        first, last = frozenset((0,)), frozenset((self.last,))
        # a head that is tied to the embeddings stores their weights under the embeddings' name
        with_table = first | last if parts.is_tied else first
        self.places = [StagePart(owner, name, self.received, first, with_table)]
        for stage, numbers in enumerate(ranges):
            for number in numbers:
                other, only = PassThrough(parts.layers[number]), frozenset((stage,))
                self.places.append(StagePart(parts.layers, str(number), other, only, only))
        for owner, name in parts.ends:
            other = PassThrough(owner._modules[name])  # type: ignore[arg-type]
            self.places.append(StagePart(owner, name, other, last, last))
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


class Action(NamedTuple):
    """A forward or backward pass of one of the rank's stages."""

    is_forward: bool
    chunk: int
    """Index of the stage among this rank's stages."""
    number: int
    """Index of the pass in the mini-batch."""


def num_chunks(kind: str) -> int:
    """Return the number of stages per rank."""
    return 2 if kind == "interleaved" else 1


def schedule(kind: str, rank: int, num_ranks: int, num_passes: int) -> list[Action]:
    """Return the actions of a rank, in order."""
    chunks = range(num_chunks(kind))
    rounds = [
        range(begin, min(begin + num_ranks, num_passes))
        for begin in range(0, num_passes, num_ranks)
    ]
    num_waiting = num_ranks - rank - 1
    if len(chunks) > 1:
        num_waiting = (len(chunks) - 1) * num_ranks + 2 * num_waiting
    if kind == "gpipe":
        num_waiting = num_passes

    # the missing passes of an incomplete last round keep their places in the order
    order = [(chunk, place) for chunk in chunks for place in range(num_ranks)]
    forward = [(chunk, number, place) for number, _ in enumerate(rounds) for chunk, place in order]
    actions: list[Action] = []
    total = len(forward)
    num_waiting = min(num_waiting, total)

    def add(is_forward: bool, step: int) -> None:
        chunk, number, place = forward[step]
        if place < len(rounds[number]):
            chunk_here = chunk if is_forward else chunks[-1 - chunk]
            actions.append(Action(is_forward, chunk_here, rounds[number][place]))

    for step in range(total + num_waiting):
        if step < total:
            add(True, step)
        if step >= num_waiting:
            add(False, step - num_waiting)
    return actions


def max_pending_passes(kind: str, rank: int, num_ranks: int) -> int:
    """Return the largest number of forward passes of a rank that wait for their backward passes.

    A pass goes through all stages of the rank. Under gpipe, all passes of a mini-batch wait; this
    assumes as many passes as ranks.
    """
    waiting = most = 0
    for action in schedule(kind, rank, num_ranks, 4 * num_ranks if kind != "gpipe" else num_ranks):
        waiting += 1 if action.is_forward else -1
        most = max(most, waiting)
    return -(-most // num_chunks(kind))


class Pipeline:
    """Computes this rank's stages of a model, and exchanges states with neighboring ranks."""

    def __init__(
        self,
        stages: Stages,
        line: dist.ProcessGroup,
        kind: str,
        links: Sequence[dist.ProcessGroup],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Create the pipeline of a rank; `links` are groups of the ranks of the `line` (`_link`).

        `dtype` is the dtype of the states between stages.
        """
        self.stages, self.line, self.kind, self.links = stages, line, kind, links
        self.dtype, self.device = dtype, device
        self.rank, self.size = line.rank(), line.size()
        self.last = self.size * num_chunks(kind) - 1
        self.waiting: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        """(chunk, number) -> received states and results of a pass, until its backward pass."""
        self._sent: list[tuple[Any, Tensor]] = []

    @property
    def has_last(self) -> bool:
        """True if this rank has the model's outputs."""
        return self.rank == self.size - 1

    def stage_of(self, action: Action) -> int:
        """Return the number of the stage that the action computes."""
        return action.chunk * self.size + self.rank

    def actions(self, num_passes: int, trains: bool = True) -> Iterator[Action]:
        """Yield the rank's actions in order; at the end, wait until everything is sent."""
        self.waiting.clear()
        for action in schedule(self.kind, self.rank, self.size, num_passes):
            if trains or action.is_forward:
                yield action
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    @contextmanager
    def computing(self, action: Action, shapes: Sequence[Sequence[int]]) -> Iterator[list[Tensor]]:
        """Context in which the module computes a stage; add its results to the yielded list.

        Results are states, which are sent to the next stage, and losses, which are scalars.
        `shapes` are the shapes of the states from the previous stage.
        """
        stage, is_trained = self.stage_of(action), torch.is_grad_enabled()
        received = [self._receive(shape, stage - 1, stage) for shape in shapes]
        for states in received:
            states.requires_grad_(is_trained)
        results: list[Tensor] = []
        with self.stages.computing(stage, received):
            yield results
        for states in results:
            if states.dim():
                self._send(states.detach(), stage, stage + 1)
        if is_trained:
            self.waiting[action.chunk, action.number] = received, results

    def backward(self, action: Action) -> None:
        """Compute gradients of the stage's weights, and of the states that it received."""
        stage = self.stage_of(action)
        received, outputs = self.waiting.pop((action.chunk, action.number))
        # a non-finite loss has a gradient of NaN, even if its formula clamps
        grads = [
            self._receive(x.shape, stage + 1, stage) if x.dim() else 1 + (x - x).detach()
            for x in outputs
        ]
        # outputs of layers below all trained weights have no gradient
        needed = [n for n, x in enumerate(outputs) if x.requires_grad or not x.dim()]
        if needed:
            torch.autograd.backward([outputs[n] for n in needed], [grads[n] for n in needed])
        for states in received:
            grad = states.grad
            self._send(torch.zeros_like(states) if grad is None else grad, stage, stage - 1)

    def from_last(self, result: Any) -> Any:
        """Return the result of the rank with the last stage, on all ranks of the line."""
        received = [result]
        dist.broadcast_object_list(
            received, group=self.line, group_src=self.size - 1, device=self.device
        )
        return received[0]

    def _link(self, source: int, target: int) -> dist.ProcessGroup:
        """Return the group on which one stage sends to its neighbor."""
        is_forward = target > source
        goes_round = (max(source, target) % self.size) == 0
        return self.links[2 * goes_round + is_forward]

    def _send(self, states: Tensor, source: int, target: int) -> None:
        if states.dtype != self.dtype:
            raise ConfigError(
                f"parallel.pp={self.size}: the states between layers are {states.dtype}, "
                f"but passes compute in {self.dtype}. Set parallel.pp=1, or compute_dtype in the "
                f"model's section to {str(states.dtype).removeprefix('torch.')}."
            )
        self._sent = [(work, sent) for work, sent in self._sent if not work.is_completed()]
        states = states.contiguous()
        group = self._link(source, target)
        work = dist.isend(states, group=group, group_dst=target % self.size)
        self._sent.append((work, states))

    def _receive(self, shape: Sequence[int], source: int, target: int) -> Tensor:
        states = torch.empty(*shape, dtype=self.dtype, device=self.device)
        group = self._link(source, target)
        dist.recv(states, group=group, group_src=source % self.size)
        return states


def exchange_sum(gradient: Tensor, line: dist.ProcessGroup) -> Tensor:
    """Return the sum over the first and the last rank of a line, bit-identical on both."""
    other = torch.empty_like(gradient)
    peer = line.size() - 1 - line.rank()
    operations = [
        dist.P2POp(op, tensor, group=line, group_peer=peer)
        for op, tensor in ((dist.isend, gradient.contiguous()), (dist.irecv, other))
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return gradient + other


Named = Iterator[tuple[str, Tensor]]


def gather_stage_tensors(
    line: dist.ProcessGroup,
    layouts: list[tuple[str, torch.Size, torch.dtype]],
    tensors: Named,
    on_all_ranks: bool,
    is_first: bool,
    device: torch.device,
) -> Named:
    """Yield the tensors of all ranks of a line, in rank order; every rank must call this.

    `layouts` has the names, shapes and dtypes of this rank's `tensors`. Unless `on_all_ranks`, only
    the first rank of the line receives tensors, and only if its `is_first` is true.
    """
    for rank in range(line.size()):
        received: list[Any] = [layouts if rank == line.rank() else None]
        dist.broadcast_object_list(received, group=line, group_src=rank, device=device)
        if rank == line.rank():
            for name, tensor in tensors:
                if on_all_ranks:
                    dist.broadcast(_bytes(tensor), group=line, group_src=rank)
                elif rank > 0:
                    dist.send(_bytes(tensor), group=line, group_dst=0)
                    continue
                yield name, tensor
        elif on_all_ranks or (is_first and line.rank() == 0):
            for name, shape, dtype in received[0]:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                if on_all_ranks:
                    dist.broadcast(_bytes(tensor), group=line, group_src=rank)
                else:
                    dist.recv(_bytes(tensor), group=line, group_src=rank)
                yield name, tensor


def _bytes(tensor: Tensor) -> Tensor:
    """Return a view as bytes, which every backend can send, or a copy if the memory has gaps."""
    return tensor.detach().reshape(-1).view(torch.uint8)
