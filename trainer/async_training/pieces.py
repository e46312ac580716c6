"""Where the pieces of a run's batches are: in the stream of prompts, in flight, or queued.

Nothing here waits or locks: the buffer (`trainer.async_training.buffer`) calls it under its lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from trainer.async_training.config import AsyncConfig, open_at_once, samples_per_batch
from trainer.async_training.rounds import Demand
from trainer.async_training.samplers import Experience, Stock, num_samples_of
from trainer.async_training.topology import ANY_RANK, by_first
from trainer.rollouts.samples import repeat_prompts
from verl_like.batch.protocol import DataProto


class Loader(Protocol):
    """The part of `trainer.data.prompts.PromptLoader` that the buffer uses."""

    def batch(self, number: int) -> DataProto:
        """The prompts of that batch."""

    def num_prompts(self, number: int) -> int:
        """The number of prompts in that batch; 0 after the last batch."""


class PieceStream:
    """The loader's batches, cut into pieces in the order of the prompts.

    A piece whose generator was lost is handed back, and is handed out again before any later piece.
    """

    def __init__(self, config: AsyncConfig, loader: Loader) -> None:
        """Trainer ranks with generators of their own get equal parts of every batch."""
        self._loader, self._topology = loader, config.topology
        self._prompts_per_call = config.piece_size
        self._samples_per_prompt = config.actor_rollout_ref.rollout.n
        self.ranks = self._topology.routed_ranks
        self.waiting: list[Experience] = []
        """Pieces that no generator has, in their order."""
        self._batches: dict[int, DataProto] = {}
        self._next_batch = self._next_number = 0

    @property
    def has_ended(self) -> bool:
        """Whether the loader has no further batch."""
        return self._loader.num_prompts(self._next_batch) == 0

    def offer(self, generator: int) -> Experience | None:
        """The first waiting piece that this generator may make; it stays in the stream.

        None: no prompts are left for this generator.
        """
        while True:
            for piece in self.waiting:
                if piece.rank == ANY_RANK or generator in self._topology.generators_of(piece.rank):
                    return piece
            if self.has_ended:
                return None
            self._cut()

    def hand_back(self, pieces: Iterable[Experience]) -> None:
        """Put these pieces back in their order; they are handed out next."""
        self.waiting = sorted([*self.waiting, *pieces], key=lambda piece: piece.number)

    def rows(self, piece: Experience) -> DataProto:
        """A row for each sample of a piece."""
        if piece.batch not in self._batches:
            # pieces come batch by batch: two are enough for those that overlap
            self._batches = dict(list(self._batches.items())[-1:])
            self._batches[piece.batch] = self._loader.batch(piece.batch)
        prompts = self._batches[piece.batch][piece.start : piece.stop]
        rows = repeat_prompts(prompts, self._samples_per_prompt)
        piece.uids = [*dict.fromkeys(map(str, rows.non_tensor_batch["uid"]))]
        return rows

    def num_samples(self, batch: int) -> int:
        """The number of samples in that batch."""
        return self._loader.num_prompts(batch) * self._samples_per_prompt

    def state_dict(self, being_made: Iterable[Experience] = ()) -> dict[str, Any]:
        """The stream's place, with the pieces that a resume has to generate again."""
        waiting = sorted([*self.waiting, *being_made], key=lambda piece: piece.number)
        return {
            "next_batch": self._next_batch,
            "next_number": self._next_number,
            "waiting": [piece.place() for piece in waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._next_batch, self._next_number = state["next_batch"], state["next_number"]
        self.waiting = [Experience(**place) for place in state["waiting"]]

    def _cut(self) -> None:
        """Cut the loader's next batch into pieces."""
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        num_prompts, num_ranks = self._loader.num_prompts(batch), len(self.ranks)
        for place, rank in enumerate(self.ranks):
            last = (place + 1) * num_prompts // num_ranks
            for start in range(place * num_prompts // num_ranks, last, self._prompts_per_call):
                stop = min(start + self._prompts_per_call, last)
                piece = Experience(
                    number=self._next_number,
                    num_samples=(stop - start) * self._samples_per_prompt,
                    batch=batch,
                    start=start,
                    stop=stop,
                    rank=rank,
                )
                self.waiting.append(piece)
                self._next_number += 1


class OpenPieces:
    """The pieces that are queued or in flight, and how many there may be."""

    def __init__(self, config: AsyncConfig, stream: PieceStream) -> None:
        """`async_training.max_inflight_samples` and the largest age of samples bound the open
        pieces.
        """
        self._settings, self._seed = config.async_training, config.trainer.seed
        self._samples_per_version = config.async_training.update_steps * samples_per_batch(config)
        self._limit = open_at_once(config)
        self._evicts = config.async_training.on_buffer_full == "evict_oldest"
        self._stream = stream
        self.ready: list[Experience] = []
        """The queued pieces, in the order in which they came."""
        self.in_flight: dict[int, Experience] = {}
        """Number -> piece that a generator is generating."""

    @property
    def is_too_full(self) -> bool:
        """Whether the oldest piece has to go, with `on_buffer_full=evict_oldest`."""
        return self._evicts and num_samples_of(self.ready) > self._limit

    def has_room(self, piece: Experience, lag: int, demand: Demand) -> bool:
        """Return whether one more piece may begin, with weights that are `lag` versions old."""
        before = [other for other in self._stream.waiting if other.number < piece.number]
        opened = [*self.ready, *self.in_flight.values(), piece, *before]
        if not self._evicts and num_samples_of(opened) > self._limit:
            return False
        ahead = (self._settings.max_staleness - lag) * self._samples_per_version
        room = max(demand.num_samples + demand.rest_of_version + ahead, 0)
        if demand.rest_of_run is not None:
            room = min(room, demand.num_samples + demand.rest_of_run)
        of_rank = [other for other in opened if other.rank == piece.rank]
        return num_samples_of(of_rank) <= room // len(self._stream.ranks)

    def stocks(self, demand: Demand, version: int, number: int) -> Iterator[Stock]:
        """Yield the pieces for each trainer rank with generators of its own, or for any rank.

        `number` counts the batches before this one.
        """
        ranks = self._stream.ranks
        # one past the highest piece that was ever begun and is still open
        horizon = max([piece.number for piece in self.ready] + [*self.in_flight, -1]) + 1
        ready = by_first((piece.rank, piece) for piece in self.ready)
        coming = by_first((piece.rank, piece) for piece in self.in_flight.values())
        lost = by_first((p.rank, p) for p in self._stream.waiting if p.number < horizon)
        for rank in ranks:
            yield Stock(
                ready=ready.get(rank, ()),
                coming=coming.get(rank, ()),
                lost=lost.get(rank, ()),
                num_samples=demand.num_samples // len(ranks),
                version=version,
                max_staleness=self._settings.max_staleness,
                samples_per_version=self._samples_per_version // len(ranks),
                rest_of_version=demand.rest_of_version // len(ranks),
                seed=(self._seed, number),
                window=self._settings.max_sample_age,
            )
