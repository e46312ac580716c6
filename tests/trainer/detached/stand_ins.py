"""A loader of numbered prompts, and a buffer on it, for tests without models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from trainer.detached.activity import Activity
from trainer.detached.buffer import ExperienceBuffer
from trainer.detached.ledger import Ledger
from trainer.detached.pieces import BufferSettings, Experience, Order, Pacing, PieceStream
from trainer.detached.samplers import SAMPLERS, Sampler
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import WorkerDiedError
from workers.rollout.batches import REQUEST


class NumberedPrompts:
    """Batches of `size` prompts, `num_batches` of them; prompt 5 of the run has the uid "5"."""

    def __init__(self, size: int = 4, num_batches: int | None = None) -> None:
        self.size, self.num_batches = size, num_batches

    def num_prompts(self, number: int) -> int:
        is_there = self.num_batches is None or number < self.num_batches
        return self.size if is_there else 0

    def batch(self, number: int) -> DataProto:
        first = number * self.size
        uids = [str(first + place) for place in range(self.size)]
        rows = torch.arange(first, first + self.size)[:, None]
        names = ("input_ids", "attention_mask", "position_ids", "response_mask")
        tensors = {name: rows if name == "input_ids" else torch.ones_like(rows) for name in names}
        return DataProto.from_dict(tensors, {"uid": object_rows(uids)})


def make_buffer(
    *,
    piece: int = 2,
    batch: int = 4,
    samples: int = 1,
    max_staleness: int = 1,
    sampler: str = "in_order",
    limit: int = 1000,
    evicts: bool = False,
    num_batches: int | None = None,
    window: int | None = None,
    own_sampler: Sampler | None = None,
    makers_of: Sequence[Sequence[int]] | None = None,
    stall_s: float = 120.0,
) -> ExperienceBuffer:
    """A buffer of an unlimited run, at version 1 of the weights.

    With `makers_of` every trainer rank has its own.
    """
    prompts = NumberedPrompts(batch, num_batches)
    stream = PieceStream(prompts, piece, samples)
    if makers_of is not None:
        ranks = range(len(makers_of))
        stream = PieceStream(prompts, piece, samples, ranks, makers_of.__getitem__)
    pacing = Pacing(max_staleness, batch * samples)
    settings = BufferSettings(limit, evicts, seed=1, window=window, stall_s=stall_s)
    chosen = SAMPLERS.look_up(sampler)() if own_sampler is None else own_sampler
    buffer = ExperienceBuffer(stream, pacing, chosen, settings, Ledger(), Activity())
    buffer.publish(1)
    return buffer


def begin(buffer: ExperienceBuffer, maker: int = 0, version: int | None = None) -> Order:
    """What the maker is given, which must be something."""
    order = buffer.begin(maker, buffer.version if version is None else version)
    assert order is not None
    return order


def finish(buffer: ExperienceBuffer, order: Order, maker: int = 0) -> Experience:
    """The order is made, and queued."""
    experience = Experience(order.piece, maker, order.version, order.uids, order.prompts)
    buffer.put(experience)
    return experience


def may_begin(buffer: ExperienceBuffer, maker: int = 0, version: int | None = None) -> bool:
    """Whether there is room for a maker's next piece at this moment."""
    held = buffer.version if version is None else version
    return buffer._next_piece(maker, held) is not None


def train(buffer: ExperienceBuffer, taken: list[Experience], version: int) -> None:
    """All of it was trained on by rank 0."""
    rows = {uid: [(0, one.version)] for one in taken for uid in one.uids}
    buffer.trained(rows)
    buffer.publish(version)


class Answer:
    """The future of a call on one rank."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.lost_ranks: list[int] = []
        self._work = functools.cache(work)

    def get(self, timeout: float | None = None) -> Any:
        try:
            return [self._work()]
        except WorkerDiedError:
            self.lost_ranks = [0]
            raise


class StandInGroup:
    """A rollout group of one rank that makes responses of one token, when `finish` says so."""

    def __init__(self) -> None:
        self.running: list[DataProto] = []
        self.generate_sequences = SimpleNamespace(collecting_ranks=lambda: [0])
        self.submit = SimpleNamespace(remote_on=lambda rank, rows: Answer(lambda: self.add(rows)))
        self.take = SimpleNamespace(remote_on=lambda rank, *_: Answer(self.finished))

    def add(self, rows: DataProto) -> None:
        self.running.append(rows)

    def finished(self) -> DataProto | None:
        """The oldest submission."""
        rows = self.running.pop(0)
        ones = torch.ones(len(rows), 1)
        return rows.select([REQUEST]).union(DataProto.from_dict({"responses": ones}))


def asked_of(rows: DataProto, attempt: int) -> DataProto:
    """What a stand-in for a group reads."""
    return rows.select(["sample_index", "input_ids"], ["uid"])
