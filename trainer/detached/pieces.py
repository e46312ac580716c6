"""Pieces: consecutive prompts of one batch, which one maker answers in one call.

`PieceStream` cuts the loader's batches into pieces, in the order of the prompts. A piece that its
maker lost is handed back, and handed out again before any later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from trainer.detached.topology import ANY_RANK
from trainer.loop import Metrics
from verl_like.batch.protocol import DataProto
from workers.rollout.client import Submission


class Loader(Protocol):
    """What is used of a `trainer.data.prompts.PromptLoader`."""

    def batch(self, number: int) -> DataProto:
        """The prompts of that batch."""

    def num_prompts(self, number: int) -> int:
        """How many they are; 0 after the last."""


@dataclass(frozen=True)
class Piece:
    """Prompts `start` to `stop` of one of the loader's batches."""

    number: int
    """Its place in the order of the run's prompts."""
    batch: int
    start: int
    stop: int
    rank: int
    """The trainer rank whose makers may make it; -1 for any maker."""
    num_samples: int


def num_samples_of(pieces: Iterable[Piece]) -> int:
    """Of all of them."""
    return sum(piece.num_samples for piece in pieces)


@dataclass(frozen=True)
class Begun:
    """A piece whose maker lost a process, with the samples that were there."""

    maker: int
    version: int
    """Of the weights that the maker held when it began: no token is older."""
    submission: Submission

    @property
    def uids(self) -> list[str]:
        """Of the samples that are there."""
        uids = self.submission.rows.non_tensor_batch["uid"]
        return [str(uids[row]) for row in self.submission.rows_there]


@dataclass(frozen=True)
class Order:
    """What a maker is to make next."""

    piece: Piece
    prompts: DataProto
    uids: list[str]
    """One for each prompt."""
    version: int
    """Of the weights that the maker holds, or of older ones that have made a part of it."""
    attempt: int
    """The number of the draw, within its step, that it is made for."""
    begun: Begun | None = None
    """What is there already: the rest alone is to be made."""


@dataclass
class Experience:
    """The samples of a piece."""

    piece: Piece
    maker: int
    version: int
    """Of the weights that the maker held when it began: no token is older."""
    uids: list[str]
    """One for each prompt."""
    rows: DataProto = field(repr=False)
    metrics: Metrics = field(default_factory=dict)
    """Numbers that came with the maker's scores."""

    @classmethod
    def of(cls, order: Order, maker: int, samples: DataProto, metrics: Metrics) -> Experience:
        """What the maker made of its order."""
        return cls(order.piece, maker, order.version, order.uids, samples, metrics)

    @property
    def num_samples(self) -> int:
        """Rows."""
        return self.piece.num_samples


class PieceStream:
    """Pieces; `makers_of(rank)` may make those of a trainer rank.

    Not thread-safe: `ExperienceBuffer` calls it under its lock.
    """

    def __init__(
        self,
        loader: Loader,
        prompts_per_piece: int,
        samples_per_prompt: int,
        ranks: Sequence[int] = (ANY_RANK,),
        makers_of: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """A batch is cut into equal parts, one for each of `ranks`, and those into pieces."""
        self._loader = loader
        self._prompts_per_piece = prompts_per_piece
        self._samples_per_prompt = samples_per_prompt
        self.ranks = list(ranks)
        self._makers_of = makers_of
        self._waiting: list[Piece] = []
        self._begun: dict[int, Begun] = {}
        self._batches: dict[int, DataProto] = {}
        self._next_batch = 0
        self._next_number = 0

    def offer(self, maker: int) -> Piece | None:
        """The first piece that is nobody's and that this maker may make; it stays in the stream.

        None: no prompts are left for it.
        """
        for piece in self._waiting:
            if self._may_make(maker, piece):
                return piece
        if self.has_ended:
            return None
        self._cut()
        return self.offer(maker)

    @property
    def has_ended(self) -> bool:
        """Whether the loader has no further batch."""
        return self._loader.num_prompts(self._next_batch) == 0

    def hand_out(self, piece: Piece) -> Begun | None:
        """Take the piece out of the stream; gives what is there of its samples."""
        self._waiting.remove(piece)
        return self._begun.pop(piece.number, None)

    def hand_back(self, pieces: Sequence[Piece], begun: Mapping[int, Begun] | None = None) -> None:
        """Pieces that were not made: the next ones to be handed out, in their order.

        `begun` has by number what is there of some.
        """
        self._waiting = sorted([*self._waiting, *pieces], key=lambda piece: piece.number)
        self._begun |= begun or {}

    def waiting_before(self, piece: Piece) -> list[Piece]:
        """Pieces that nobody makes yet and that come before this one."""
        return [other for other in self._waiting if other.number < piece.number]

    @property
    def waiting(self) -> list[Piece]:
        """Pieces that are cut and that nobody makes yet."""
        return list(self._waiting)

    def prompts(self, piece: Piece) -> DataProto:
        """The rows of a piece."""
        if piece.batch not in self._batches:
            # pieces come batch by batch: two are enough for those that overlap
            self._batches = dict(list(self._batches.items())[-1:])
            self._batches[piece.batch] = self._loader.batch(piece.batch)
        return self._batches[piece.batch][piece.start : piece.stop]

    def num_samples(self, batch: int) -> int:
        """Samples of the loader's batch of that number."""
        return self._loader.num_prompts(batch) * self._samples_per_prompt

    def state_dict(self, lost: Sequence[Piece] = ()) -> dict[str, Any]:
        """Where the stream stands, with pieces that would have to be made again."""
        waiting = sorted([*self._waiting, *lost], key=lambda piece: piece.number)
        return {
            "next_batch": self._next_batch,
            "next_number": self._next_number,
            "waiting": [asdict(piece) for piece in waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._next_batch, self._next_number = state["next_batch"], state["next_number"]
        self._waiting = [Piece(**piece) for piece in state["waiting"]]

    def _may_make(self, maker: int, piece: Piece) -> bool:
        if piece.rank == ANY_RANK or self._makers_of is None:
            return True
        return maker in self._makers_of(piece.rank)

    def _cut(self) -> None:
        """The pieces of the loader's next batch."""
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        num_prompts, num_ranks = self._loader.num_prompts(batch), len(self.ranks)
        for place, rank in enumerate(self.ranks):
            first = place * num_prompts // num_ranks
            last = (place + 1) * num_prompts // num_ranks
            for start in range(first, last, self._prompts_per_piece):
                stop = min(start + self._prompts_per_piece, last)
                num_samples = (stop - start) * self._samples_per_prompt
                piece = Piece(self._next_number, batch, start, stop, rank, num_samples)
                self._waiting.append(piece)
                self._next_number += 1


@dataclass(frozen=True)
class BufferSettings:
    """What the configuration says of the experience buffer."""

    limit: int
    evicts: bool
    """Whether what comes into a full buffer pushes the oldest out, instead of waiting."""
    seed: int
    window: int | None = None
    stall_s: float = 120.0


@dataclass(frozen=True)
class Demand:
    """What the trainer waits for, if it does, and what it will ask for later."""

    num_samples: int = 0
    attempt: int = 0
    rest_of_version: int = 0
    """Fresh samples after these, before the next version of the weights."""
    rest_of_run: int | None = None
    """Fresh samples after these; None: nobody can say."""


@dataclass(frozen=True)
class Pacing:
    """The bound of a run, in samples."""

    max_staleness: int
    """Versions between the draw of a sample's oldest token and the update that trains on it."""
    samples_per_version: int
    """Fresh samples that are trained on between two versions of the weights."""

    def bound(self, demand: Demand, lag: int) -> int:
        """Samples that may be open at once, for a maker whose weights are `lag` versions old."""
        ahead = (self.max_staleness - lag) * self.samples_per_version
        bound = max(demand.num_samples + demand.rest_of_version + ahead, 0)
        if demand.rest_of_run is None:
            return bound
        return min(bound, demand.num_samples + demand.rest_of_run)
