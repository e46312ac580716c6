"""Track the chunks of a run's batches: waiting for a generator, in flight, or ready.

Nothing here waits or locks: the buffer (`trainer.async_training.buffer`) calls it under its lock.

With `update_steps` U and `train_epochs` E, a round has U x E steps. It trains on U fresh batches in
the order in which they arrive, then on the same batches E - 1 more times, each time in a new order.
At the end of the round, a new version of the weights is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainer.async_training.config import AsyncConfig, open_at_once
from trainer.async_training.samplers import BufferView, SampleChunk, num_samples_of
from trainer.async_training.topology import ANY_RANK, by_first
from trainer.rollouts.samples import repeat_prompts
from verl_like.batch.protocol import DataProto


@dataclass(frozen=True)
class Demand:
    """Numbers of samples: those that the trainer waits for now, and those it will need later."""

    num_samples: int = 0
    attempt: int = 0
    """Number of batches that the step has taken before this one."""
    samples_left_in_version: int = 0
    """Fresh samples needed after these and before the next version of the weights."""
    rest_of_run: int | None = None
    """Fresh samples needed after these until the end of the run, as far as generators may run
    ahead; None if unknown.
    """


@dataclass(frozen=True)
class Rounds:
    """The schedule of a run: batches per weight version, and updates per batch."""

    update_steps: int
    train_epochs: int
    seed: int
    max_staleness: int = 0
    has_filter: bool = False
    """True if a step may need any number of samples (`algorithm.filter_groups`)."""

    @classmethod
    def of(cls, config: AsyncConfig) -> Rounds:
        """Return the schedule that a configuration describes."""
        async_training = config.async_training
        return cls(
            update_steps=async_training.update_steps,
            train_epochs=async_training.train_epochs,
            seed=config.trainer.seed,
            max_staleness=async_training.max_staleness,
            has_filter=config.algorithm.filter_groups.enable,
        )

    @property
    def length(self) -> int:
        """Steps per round."""
        return self.update_steps * self.train_epochs

    def place(self, step: int) -> tuple[int, int, int]:
        """Return (round, epoch, batch) of a step. Steps count from 1, the result from 0."""
        number, place = divmod(step - 1, self.length)
        return number, *divmod(place, self.update_steps)

    def is_fresh(self, step: int) -> bool:
        """Return whether this step trains on a batch for the first time."""
        return self.place(step)[1] == 0

    def batch_of(self, step: int) -> int:
        """Return the index of the step's batch among the fresh batches of its round."""
        number, epoch, place = self.place(step)
        return self.order(number, epoch)[place]

    def order(self, number: int, epoch: int) -> list[int]:
        """Return the order of a round's batches in an epoch; epoch 0 keeps the order of arrival."""
        if epoch == 0:
            return list(range(self.update_steps))
        order = np.random.default_rng([self.seed, number, epoch]).permutation(self.update_steps)
        return [int(batch) for batch in order]

    def num_fresh(self, steps: int) -> int:
        """Count the fresh batches in the run's first `steps` steps."""
        cycles, rest = divmod(steps, self.length)
        return cycles * self.update_steps + min(rest, self.update_steps)

    def ends_with(self, step: int) -> bool:
        """Return whether this step is the last one of its round."""
        return step % self.length == 0

    def demand(
        self, step: int, total_steps: int, samples_of: Callable[[int], int], attempt: int = 0
    ) -> Demand:
        """Return how many samples one draw of a step needs, and how many later steps need.

        `samples_of` returns the number of samples in one of the loader's batches.
        """
        batch, place = self.num_fresh(step) - 1, self.place(step)[2]
        last_of_version = batch + self.update_steps - place
        rest_of_run = None
        if not self.has_filter:
            total = self.num_fresh(total_steps)
            last_of_version = min(last_of_version, total)
            # no need to look further ahead: there the staleness limit stops generators first
            ahead = (self.max_staleness + 1) * self.update_steps
            rest_of_run = sum(map(samples_of, range(batch + 1, min(total, batch + 1 + ahead))))
        samples_left_in_version = sum(map(samples_of, range(batch + 1, last_of_version)))
        return Demand(samples_of(batch), attempt, samples_left_in_version, rest_of_run)


class Loader(Protocol):
    """The part of `trainer.data.prompts.PromptLoader` that the buffer uses."""

    def batch(self, number: int) -> DataProto:
        """Return the prompts of a batch."""

    def num_prompts(self, number: int) -> int:
        """Return the number of prompts in a batch; 0 if the loader has no such batch."""


class Chunks:
    """The loader's batches, cut into chunks in the order of the prompts, and where each chunk is.

    A chunk waits for a generator, then is in flight, then ready. The number of samples that are in
    flight or ready is limited by `async_training.max_inflight_samples` and by staleness. A chunk
    whose generator was lost waits again, and is handed out before later chunks.
    """

    def __init__(self, config: AsyncConfig, loader: Loader) -> None:
        """If trainer ranks have their own generators, cut every batch into equal parts for them."""
        self._settings, self._seed = config.async_training, config.trainer.seed
        self._loader, self._topology = loader, config.topology
        self._prompts_per_call = config.chunk_size
        self._samples_per_prompt = config.actor_rollout_ref.rollout.n
        self.ranks = self._topology.routed_ranks
        self.waiting: list[SampleChunk] = []
        """Chunks that no generator has started, in order."""
        self.in_flight: dict[int, SampleChunk] = {}
        """Maps the number of a chunk to the chunk, while a generator generates it."""
        self.ready: list[SampleChunk] = []
        """The queued chunks, in the order in which they arrived."""
        self._samples_per_version = config.async_training.update_steps * config.samples_per_batch
        self._limit = open_at_once(config)
        self._evicts = config.async_training.on_buffer_full == "evict_oldest"
        self._batches: dict[int, DataProto] = {}
        self._next_batch = self._next_number = 0

    @property
    def has_ended(self) -> bool:
        """True if the loader has no more batches."""
        return self._loader.num_prompts(self._next_batch) == 0

    def offer(self, generator: int) -> SampleChunk | None:
        """Return the first waiting chunk that this generator may generate, without removing it.

        Return None if no prompts are left for this generator.
        """
        while True:
            for chunk in self.waiting:
                if chunk.rank == ANY_RANK or generator in self._topology.generators_of[chunk.rank]:
                    return chunk
            if self.has_ended:
                return None
            self._cut()

    def hand_back(self, chunks: Iterable[SampleChunk]) -> None:
        """Let these chunks wait again, in order, to be handed out next."""
        self.waiting = sorted([*self.waiting, *chunks], key=lambda chunk: chunk.number)

    def rows(self, chunk: SampleChunk) -> DataProto:
        """Return a row for each sample of a chunk."""
        if chunk.batch not in self._batches:
            # chunks come batch by batch, so it is enough to keep the rows of two batches
            self._batches = dict(list(self._batches.items())[-1:])
            self._batches[chunk.batch] = self._loader.batch(chunk.batch)
        prompts = self._batches[chunk.batch][chunk.start : chunk.stop]
        rows = repeat_prompts(prompts, self._samples_per_prompt)
        chunk.uids = [*dict.fromkeys(map(str, rows.non_tensor_batch["uid"]))]
        return rows

    def num_samples(self, batch: int) -> int:
        """Return the number of samples in a batch."""
        return self._loader.num_prompts(batch) * self._samples_per_prompt

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the prompts, and the chunks that a resume has to generate."""
        waiting = sorted([*self.waiting, *self.in_flight.values()], key=lambda chunk: chunk.number)
        return {
            "next_batch": self._next_batch,
            "next_number": self._next_number,
            "waiting": [chunk.place() for chunk in waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._next_batch, self._next_number = state["next_batch"], state["next_number"]
        self.waiting = [SampleChunk(**place) for place in state["waiting"]]

    def _cut(self) -> None:
        """Cut the loader's next batch into chunks."""
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        num_prompts, num_ranks = self._loader.num_prompts(batch), len(self.ranks)
        for place, rank in enumerate(self.ranks):
            last = (place + 1) * num_prompts // num_ranks
            for start in range(place * num_prompts // num_ranks, last, self._prompts_per_call):
                stop = min(start + self._prompts_per_call, last)
                chunk = SampleChunk(
                    number=self._next_number,
                    num_samples=(stop - start) * self._samples_per_prompt,
                    batch=batch,
                    start=start,
                    stop=stop,
                    rank=rank,
                )
                self.waiting.append(chunk)
                self._next_number += 1

    @property
    def is_too_full(self) -> bool:
        """True if `on_buffer_full=evict_oldest` is set, and the oldest chunk must be evicted."""
        return self._evicts and num_samples_of(self.ready) > self._limit

    def has_room(self, chunk: SampleChunk, lag: int, demand: Demand) -> bool:
        """Return whether this chunk may start with weights that are `lag` versions old."""
        before = [other for other in self.waiting if other.number < chunk.number]
        opened = [*self.ready, *self.in_flight.values(), chunk, *before]
        if not self._evicts and num_samples_of(opened) > self._limit:
            return False
        ahead = (self._settings.max_staleness - lag) * self._samples_per_version
        room = max(demand.num_samples + demand.samples_left_in_version + ahead, 0)
        if demand.rest_of_run is not None:
            room = min(room, demand.num_samples + demand.rest_of_run)
        of_rank = [other for other in opened if other.rank == chunk.rank]
        return num_samples_of(of_rank) <= room // len(self.ranks)

    def views(self, demand: Demand, version: int, number: int) -> Iterator[BufferView]:
        """Yield a sampler's views: one per trainer rank with its own generators, or a single one.

        `number` is the number of batches before this one.
        """
        # one past the highest number of an open chunk
        horizon = max([chunk.number for chunk in self.ready] + [*self.in_flight, -1]) + 1
        ready = by_first((chunk.rank, chunk) for chunk in self.ready)
        coming = by_first((chunk.rank, chunk) for chunk in self.in_flight.values())
        lost = by_first((p.rank, p) for p in self.waiting if p.number < horizon)
        for rank in self.ranks:
            yield BufferView(
                ready=ready.get(rank, ()),
                in_progress=coming.get(rank, ()),
                orphaned=lost.get(rank, ()),
                num_samples=demand.num_samples // len(self.ranks),
                version=version,
                max_staleness=self._settings.max_staleness,
                samples_per_version=self._samples_per_version // len(self.ranks),
                samples_left_in_version=demand.samples_left_in_version // len(self.ranks),
                seed=(self._seed, number),
                drop_older_than=self._settings.drop_older_than,
            )
