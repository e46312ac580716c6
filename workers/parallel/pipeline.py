"""Pipeline parallelism: the order in which a rank's stages compute passes, and their exchange.

    for action in pipeline.actions(num_passes):         # one stage: F0 B0 F1 B1 ...
        if action.is_forward:
            with pipeline.computing(action, shapes) as results:     # after it received its states
                results += [module(**inputs)]                       # states are sent on in the end
        else:
            pipeline.backward(action)

The ranks along "pp", a line, hold the same rows and cut them alike. So each knows the shapes that
it receives, and passes may have unlike lengths. Gradients are added up in the order of the passes,
as one process adds them. A send does not wait. A receive does, on a group of its own for each
direction and neighbour: no two ranks wait for each other, and states arrive in the order of sends.

gpipe: all forward passes first (arXiv 1811.06965). 1f1b: as few of them as keep all ranks at work
(PipeDream-Flush, arXiv 2006.09503). interleaved: 1f1b over two stages per rank, which are idle for
half the time (arXiv 2104.04473).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.errors import ConfigError
from workers.parallel.stages import Stages


class Action(NamedTuple):
    """A forward or backward pass of one of the rank's stages."""

    is_forward: bool
    chunk: int
    """Which of the rank's stages."""
    number: int
    """Which pass of the mini-batch."""


def num_chunks(kind: str) -> int:
    """Stages of a rank."""
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

    # a last round that is not full has its places, which stay empty
    order = [(chunk, place) for chunk in chunks for place in range(num_ranks)]
    forward = [(chunk, number, place) for number, _ in enumerate(rounds) for chunk, place in order]
    found: list[Action] = []
    total = len(forward)
    num_waiting = min(num_waiting, total)

    def add(is_forward: bool, step: int) -> None:
        chunk, number, place = forward[step]
        if place < len(rounds[number]):
            own = chunk if is_forward else chunks[-1 - chunk]
            found.append(Action(is_forward, own, rounds[number][place]))

    for step in range(total + num_waiting):
        if step < total:
            add(True, step)
        if step >= num_waiting:
            add(False, step - num_waiting)
    return found


def most_waiting(kind: str, rank: int, num_ranks: int) -> int:
    """Return the largest number of a rank's passes that wait for their backward passes.

    Under gpipe all passes of a mini-batch do; they count as many as there are ranks.
    """
    waiting = most = 0
    for action in schedule(kind, rank, num_ranks, 4 * num_ranks if kind != "gpipe" else num_ranks):
        waiting += 1 if action.is_forward else -1
        most = max(most, waiting)
    return -(-most // num_chunks(kind))


class Pipeline:
    """The stages of a model that this rank computes, and its ways to the ranks beside it."""

    def __init__(
        self,
        stages: Stages,
        line: dist.ProcessGroup,
        kind: str,
        links: Sequence[dist.ProcessGroup],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`links` are groups of the ranks of the `line` (`_link`).

        `dtype` is the type of states between stages.
        """
        self.stages, self.line, self.kind, self.links = stages, line, kind, links
        self.dtype, self.device = dtype, device
        self.rank, self.size = line.rank(), line.size()
        self.last = self.size * num_chunks(kind) - 1
        self.waiting: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        """By chunk and number, states received and results of a pass, until its backward pass."""
        self._sent: list[tuple[Any, Tensor]] = []

    @property
    def has_last(self) -> bool:
        """Whether this rank has the model's outputs."""
        return self.rank == self.size - 1

    def stage_of(self, action: Action) -> int:
        """Return the number of the stage that the action computes."""
        return action.chunk * self.size + self.rank

    def actions(self, num_passes: int, trains: bool = True) -> Iterator[Action]:
        """Yield the rank's actions in order; in the end all that it sent has arrived."""
        self.waiting.clear()
        for action in schedule(self.kind, self.rank, self.size, num_passes):
            if trains or action.is_forward:
                yield action
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    @contextmanager
    def computing(self, action: Action, shapes: Sequence[Sequence[int]]) -> Iterator[list[Tensor]]:
        """Within, the module computes a stage; its results are added to the list.

        Results are states, which are sent on, and losses, which are scalars. `shapes` are those of
        the states that the stage before has sent.
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
        received, given = self.waiting.pop((action.chunk, action.number))
        # a loss that is not finite has a gradient of NaN, also where its formula clamps
        grads = [
            self._receive(one.shape, stage + 1, stage) if one.dim() else 1 + (one - one).detach()
            for one in given
        ]
        # what comes before all that is trained has no gradient
        needed = [n for n, one in enumerate(given) if one.requires_grad or not one.dim()]
        if needed:
            torch.autograd.backward([given[n] for n in needed], [grads[n] for n in needed])
        for states in received:
            grad = states.grad
            self._send(torch.zeros_like(states) if grad is None else grad, stage, stage - 1)

    def from_last(self, found: Any) -> Any:
        """Return the result of the rank with the last stage, on all ranks of the line."""
        told = [found]
        dist.broadcast_object_list(
            told, group=self.line, group_src=self.size - 1, device=self.device
        )
        return told[0]

    def _link(self, source: int, target: int) -> dist.ProcessGroup:
        """The group on which one stage sends to its neighbour."""
        is_forward = target > source
        goes_round = (max(source, target) % self.size) == 0
        return self.links[2 * goes_round + is_forward]

    def _send(self, states: Tensor, source: int, target: int) -> None:
        if states.dtype != self.dtype:
            raise ConfigError(
                f"parallel.pp={self.size}: between layers states are {states.dtype}, and passes "
                f"compute in {self.dtype}; set parallel.pp=1, or model.compute_dtype to the former."
            )
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        states = states.contiguous()
        group = self._link(source, target)
        work = dist.isend(states, group=group, group_dst=target % self.size)
        self._sent.append((work, states))

    def _receive(self, shape: Sequence[int], source: int, target: int) -> Tensor:
        states = torch.empty(*shape, dtype=self.dtype, device=self.device)
        group = self._link(source, target)
        dist.recv(states, group=group, group_src=source % self.size)
        return states


def exchanged_sum(own: Tensor, line: dist.ProcessGroup) -> Tensor:
    """Return the sum over the first and the last rank of a line, bit for bit equal on both."""
    other = torch.empty_like(own)
    peer = line.size() - 1 - line.rank()
    ways = [
        dist.P2POp(op, tensor, group=line, group_peer=peer)
        for op, tensor in ((dist.isend, own.contiguous()), (dist.irecv, other))
    ]
    for work in dist.batch_isend_irecv(ways):
        work.wait()
    return own + other


Named = Iterator[tuple[str, Tensor]]


def stage_by_stage(
    line: dist.ProcessGroup,
    facts: list[tuple[str, torch.Size, torch.dtype]],
    own: Named,
    on_all_ranks: bool,
    is_first: bool,
    device: torch.device,
) -> Named:
    """Yield the tensors of all ranks of a line, the first rank's first; collective.

    `facts` are names, shapes and types of the `own` ones. Unless `on_all_ranks` they come to the
    first rank alone of the line that `is_first`; others have none.
    """
    for rank in range(line.size()):
        told: list[Any] = [facts if rank == line.rank() else None]
        dist.broadcast_object_list(told, group=line, group_src=rank, device=device)
        if rank == line.rank():
            for name, tensor in own:
                if on_all_ranks:
                    dist.broadcast(_bytes(tensor), group=line, group_src=rank)
                elif rank > 0:
                    dist.send(_bytes(tensor), group=line, group_dst=0)
                    continue
                yield name, tensor
        elif on_all_ranks or (is_first and line.rank() == 0):
            for name, shape, dtype in told[0]:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                if on_all_ranks:
                    dist.broadcast(_bytes(tensor), group=line, group_src=rank)
                else:
                    dist.recv(_bytes(tensor), group=line, group_src=rank)
                yield name, tensor


def _bytes(tensor: Tensor) -> Tensor:
    """Return a view as bytes, which every backend can send; a copy if the memory has gaps."""
    return tensor.detach().reshape(-1).view(torch.uint8)
