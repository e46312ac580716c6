"""Pipeline parallelism: the order of passes on a rank, and the exchange of states between stages.

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
