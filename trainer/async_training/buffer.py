"""The bounded queue of samples between the generators and the trainer.

    chunk = buffer.begin(generator, weights)    # a generator waits for room and its turn
    buffer.put(chunk)                           # with its samples
    chunks = buffer.take_batch(Demand(16))            # the trainer waits for a batch
    buffer.publish(version)                     # there are newer weights

Open samples are queued or in generation. `async_training.max_inflight_samples` and `max_staleness`
limit their number. The sample log observes the buffer: it has a lock of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trainer.async_training.activity import Activity
from trainer.async_training.chunks import Chunks, Demand, Loader
from trainer.async_training.config import AsyncConfig
from trainer.async_training.samplers import (
    BATCH_SAMPLERS,
    SampleChunk,
    SelectedBatch,
    chosen,
    num_samples_of,
)
from trainer.loop import EndOfSamples
from trainer.observers import sample_log
from trainer.rollouts.samples import concat_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import VerlLikeError

CHECK_EVERY_S = 1.0
"""Seconds between checks, during a wait, of its duration and of whether the trainers are alive."""
MAX_PING_SHARE = 0.05
"""Maximum fraction of a wait spent on pinging trainers: pinging thousands of them takes long."""
LOST = "lost with its generator"
SAMPLES = "queued_samples"
"""The folder of a checkpoint that holds the queued samples."""
logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class StalledError(VerlLikeError, RuntimeError):
    """Generators or the trainer wait forever; the message says who waits for what."""


class WeightVersion(NamedTuple):
    """The weights that a generator has or may take; a greater value is newer."""

    num_swaps: int
    """Number of swaps within versions, such as to averaged weights for a validation and back."""
    version: int


class ExperienceBuffer:
    """A queue that several generators' threads fill and the trainer empties."""

    def __init__(
        self,
        config: AsyncConfig,
        loader: Loader,
        activity: Activity,
        check_trainers: Callable[[], None] = lambda: None,
    ) -> None:
        """While the trainer waits, it calls `check_trainers`, which raises if a process is lost."""
        self.settings = config.async_training
        self._sampler = BATCH_SAMPLERS.look_up(config.async_training.sampler)()
        self.chunks = Chunks(config, loader)
        self._activity, self._check_trainers = activity, check_trainers
        self.log = sample_log.SampleLog()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        """The condition on which the trainer waits."""
        self._has_turn = threading.Condition(lock)
        """The condition on which generators wait.

        A finished chunk makes no room, so it does not wake generators.
        """
        self._queued_at_save: list[SampleChunk] = []
        self._to_validate: list[SampleChunk] = []
        self._generators: set[int] = set()
        self._idle: set[int] = set()
        self.weights = WeightVersion(0, 0)
        """The newest weights that generators can take."""
        self._demand = Demand()
        self._num_taken = 0
        self._failure: BaseException | None = None
        self.is_closed = self.is_paused = False

    @property
    def version(self) -> int:
        """The version of the newest weights."""
        return self.weights.version

    # -------------------------------------------------------------------------- generators' side

    def join(self, generator: int) -> None:
        """Register a generator's thread."""
        with self._change():
            self._generators.add(generator)

    def leave(self, generator: int, error: BaseException | None = None) -> None:
        """Unregister a generator's thread.

        If it failed, its error is raised in the trainer's thread.
        """
        with self._change():
            self._generators.discard(generator)
            self._failure = self._failure or error

    def step_aside(self, generator: int, fewest: int) -> bool:
        """Unregister a generator that has no place, if `fewest` others are there; return if so."""
        with self._change():
            if len(self._generators - {generator}) < fewest:
                return False
            self._generators.discard(generator)
            return True

    def begin(
        self,
        generator: int,
        weights: WeightVersion,
        waits: bool = True,
        must_leave: Callable[[], bool] = lambda: False,
    ) -> SampleChunk | None:
        """Wait for room, and return the next chunk that a generator with these weights may start.

        Return None if there are newer weights to take first, if the run is over, if the generator
        has to go, or if there is nothing to do now and `waits` is false.
        """
        age = self.settings.max_staleness
        most = f"at most {age} version{'s' * (age != 1)} old"
        room = f"room: samples of version {weights.version} may be {most} in an update"
        with self._changed, self._activity.of(f"generator {generator}").waiting(room):
            while not (self.is_closed or self.weights > weights or must_leave()):
                chunk = self._begin_next(generator, weights.version)
                if chunk is not None or not waits:
                    return chunk
                if generator not in self._idle:
                    self._idle.add(generator)
                    self._changed.notify_all()
                self._has_turn.wait(CHECK_EVERY_S)
        return None

    def put(self, chunk: SampleChunk) -> None:
        """Queue a finished chunk.

        With `on_buffer_full=evict_oldest`, a full buffer drops its oldest chunk.
        """
        assert chunk.samples is not None, "a finished chunk has samples"
        tokens = sample_log.tokens_by_sample(chunk.samples)
        given_up = sample_log.tokens_given_up(chunk.samples)
        with self._changed:
            del self.chunks.in_flight[chunk.number]
            chunk.rows = None
            self._changed.notify_all()
            if chunk.is_validation:
                return
            self.log.receive(tokens, given_up)
            self.chunks.ready.append(chunk)
            while self.chunks.is_too_full:
                self._drop(self.chunks.ready[0], "pushed out of the full buffer")
                self._look_again()

    def lost(self, generator: int) -> int:
        """Hand a lost generator's chunks back; return their number of samples."""
        with self._change():
            lost = self.in_flight(generator)
            for chunk in lost:
                del self.chunks.in_flight[chunk.number]
                if not chunk.is_validation:
                    self.log.drop(chunk.names, LOST)
            self.chunks.hand_back(chunk for chunk in lost if not chunk.is_validation)
            self._to_validate += [chunk for chunk in lost if chunk.is_validation]
            return num_samples_of(lost)

    # ---------------------------------------------------------------------------- trainer's side

    def take_batch(self, demand: Demand) -> list[SampleChunk]:
        """Wait until the sampler chooses the chunks of a batch, and return them.

        Raise the error of a generator's thread that failed, `StalledError` if no thread can
        continue, or `EndOfSamples` if too few samples for a batch are left.
        """
        with self._changed, self._activity.of("trainer").waiting("samples"):
            self._demand = demand
            self._look_again()
            try:
                return self._wait_for(self._take_chosen)
            finally:
                # set before the lock is released: taken samples are no longer in demand
                self._demand = replace(demand, num_samples=0, attempt=0)
                self._look_again()

    def validate(self, rows: DataProto, generators: Sequence[int]) -> DataProto:
        """Divide the rows of a validation among these generators, and return their samples.

        Call it within `paused`. The rows of a lost generator go to its replacement or to another
        generator.
        """
        generators = generators[: len(rows)]
        chunks = zip(generators, rows.chunk(len(generators)), strict=True)
        parts = [
            SampleChunk(number=-1 - place, num_samples=len(rows), generator=generator, rows=rows)
            for place, (generator, rows) in enumerate(chunks)
        ]
        with self._changed:
            self._to_validate = list(parts)
            self._look_again()
            self._wait_for(lambda: all(part.samples is not None for part in parts))
        return concat_rows([part.samples for part in parts if part.samples is not None])

    def check(self) -> None:
        """Raise if the sample log does not add up, or disagrees with the buffer about a prompt."""
        with self._changed:
            queued = [uid for chunk in self.chunks.ready for uid in chunk.uids]
            in_flight = [uid for chunk in self.chunks.in_flight.values() for uid in chunk.uids]
            self.log.check({sample_log.QUEUED: queued, sample_log.IN_FLIGHT: in_flight})

    def publish(self, version: int) -> None:
        """Announce weights of this version, which generators load as soon as they may."""
        with self._change():
            swaps = self.weights.num_swaps + (version == self.version)
            self.weights = WeightVersion(swaps, version)

    @contextmanager
    def paused(self, timeout_s: float) -> Iterator[None]:
        """Wait until generators have finished their chunks; in the block, they only validate."""
        with self._changed:
            self.is_paused = True
            while self.chunks.in_flight and self._generators and self._failure is None:
                if not self._changed.wait(timeout_s):
                    raise StalledError(
                        "a validation waits until generators have finished their chunks, but for "
                        f"{timeout_s:g} s none has finished: {self._activity.who_waits()}. Lower "
                        "async_training.prompts_per_call if chunks take that long."
                    )
        try:
            yield
        finally:
            with self._change():
                self.is_paused = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the prompts, the log, and the queued chunks (but no samples)."""
        with self._changed:
            self._queued_at_save = list(self.chunks.ready)
            return {
                "stream": self.chunks.state_dict(),
                "ledger": self.log.state_dict(),
                "num_taken": self._num_taken,
                "queued": [chunk.state_dict() for chunk in self.chunks.ready],
            }

    def write_samples(self, checkpoint: Path) -> None:
        """Write the samples that were queued at the last `state_dict`.

        Do nothing unless `async_training.on_resume=restore`.
        """
        if self.settings.on_resume != "restore":
            return
        (checkpoint / SAMPLES).mkdir()
        for chunk in self._queued_at_save:
            assert chunk.samples is not None, "a queued chunk has samples"
            chunk.samples.save_to_disk(checkpoint / SAMPLES / f"{chunk.number}.safetensors")

    def load_state_dict(self, state: dict[str, Any], checkpoint: Path | None) -> None:
        """Continue from a `state_dict`.

        Queued chunks without stored samples are generated again.
        """
        restores = self.settings.on_resume == "restore"
        folder = checkpoint / SAMPLES if restores and checkpoint is not None else None
        queued = [SampleChunk.from_state(chunk, folder) for chunk in state["queued"]]
        with self._change():
            self.chunks.load_state_dict(state["stream"])
            self.chunks.hand_back(chunk for chunk in queued if chunk.samples is None)
            self.log.load_state_dict(state["ledger"])
            self._num_taken = state["num_taken"]
            self.chunks.ready = [chunk for chunk in queued if chunk.samples is not None]
            for chunk in self.chunks.ready:
                assert chunk.samples is not None, "a queued chunk has samples"
                self.log.restore(chunk.generator, sample_log.tokens_by_sample(chunk.samples))

    def close(self) -> None:
        """Stop handing out chunks, so that generators' threads end."""
        with self._change():
            self.is_closed = True

    @property
    def generators(self) -> list[int]:
        """The sorted numbers of the generators whose threads are running."""
        with self._changed:
            return sorted(self._generators)

    @property
    def depth(self) -> int:
        """The number of queued samples."""
        with self._changed:
            return num_samples_of(self.chunks.ready)

    def in_flight(self, generator: int | None = None) -> list[SampleChunk]:
        """Return the chunks that this generator is generating, or that any generator is."""
        with self._changed:
            chunks = self.chunks.in_flight.values()
            return [chunk for chunk in chunks if generator in (None, chunk.generator)]

    # ----------------------------------------------------------------------------------- inside

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._changed:
            yield
            self._look_again()

    def _look_again(self) -> None:
        """Wake all waiting threads."""
        self._idle.clear()
        self._changed.notify_all()
        self._has_turn.notify_all()

    def _wait_for(self, find: Callable[[], Result]) -> Result:
        """Wait until `find` returns a true value, and return it.

        Log who waits for what if it takes long, and raise the error of a generator or trainer.
        """
        began, warns_after = time.monotonic(), self.settings.warn_after_idle_s
        checks_at, warns_at = began + CHECK_EVERY_S, began + warns_after
        while True:
            if self._failure is not None:
                raise self._failure
            result = find()
            if result:
                return result
            self._raise_if_nobody_can_go_on()
            self._changed.wait(CHECK_EVERY_S)
            now = time.monotonic()
            if now > warns_at:
                logger.warning("no batch for %.0f s: %s", now - began, self._activity.who_waits())
                warns_at = now + warns_after
            if now > checks_at:
                self._check_trainers()
                checks_at = now + max(CHECK_EVERY_S, (time.monotonic() - now) / MAX_PING_SHARE)

    def _raise_if_nobody_can_go_on(self) -> None:
        """Raise if no samples are in flight and all generators are idle."""
        if self.chunks.in_flight or self._idle < self._generators:
            return
        num_demanded, queued = self._demand.num_samples, num_samples_of(self.chunks.ready)
        if self.chunks.has_ended and not self.is_paused:
            size = (
                f", and the queue has {queued} of the {num_demanded} samples of a batch"
                if num_demanded
                else ""
            )
            raise EndOfSamples(f"there are no more prompts{size}")
        awaited = "a validation" if self.is_paused else f"{num_demanded} samples"
        where = f"the trainer waits for {awaited}, {queued} samples are queued, "
        if not self._generators:
            raise StalledError(where + "and no generator is left.")
        raise StalledError(
            f"{where}no samples are being generated, and all generators are waiting: "
            f"{self._activity.who_waits()}. Raise async_training.max_inflight_samples or "
            "async_training.max_staleness, or use another async_training.sampler."
        )

    def _take_chosen(self) -> list[SampleChunk]:
        """Return the chunks of the sampler's batch, or [] if any trainer rank has to wait."""
        batch = SelectedBatch()
        for view in self.chunks.views(self._demand, self.version, self._num_taken):
            choice = chosen(self._sampler, view)
            batch.dropped += choice.dropped
            if not choice.selected:
                batch.selected = []
                break
            batch.selected += choice.selected
        for chunk, reason in batch.dropped:
            self._drop(chunk, reason)
            self._look_again()
        for chunk in batch.selected:
            self.chunks.ready.remove(chunk)
            self.log.mark_taken(chunk.names)
        self._num_taken += bool(batch.selected)
        return batch.selected

    def _begin_next(self, generator: int, version: int) -> SampleChunk | None:
        """Start the first chunk that this generator may generate, if there is room; return it."""
        if self.is_paused:
            others = self._generators - {generator}
            chunk = next((p for p in self._to_validate if p.generator not in others), None)
            if chunk is None:
                return None
            self._to_validate.remove(chunk)
        else:
            chunk, lag = self.chunks.offer(generator), self.version - version
            if chunk is None or not self.chunks.has_room(chunk, lag, self._demand):
                return None
            self.chunks.waiting.remove(chunk)
            chunk.version, chunk.attempt = version, self._demand.attempt
            chunk.rows = self.chunks.rows(chunk)
            self.log.begin(generator, chunk.names)
        chunk.generator = generator
        self.chunks.in_flight[chunk.number] = chunk
        self._idle.discard(generator)
        return chunk

    def _drop(self, chunk: SampleChunk, reason: str) -> None:
        self.chunks.ready.remove(chunk)
        self.log.drop(chunk.names, reason)
