"""Chunks of samples, and the samplers that choose a batch from the finished ones.

Set `async_training.sampler` to the dotted path of your own sampler. While the trainer waits for a
batch, the buffer calls `choose` whenever something has changed. `choose` returns chunks that form
exactly one batch, or none if the trainer has to go on waiting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.async_training.topology import ANY_RANK
from trainer.run_state import Metrics
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, VerlLikeError
from verl_like.registry import CallSignature, Registry, check_call, check_methods


@dataclass(eq=False, kw_only=True)
class SampleChunk:
    """A chunk of a batch: consecutive prompts whose samples one generator generates.

    The rows of a validation belong to no batch; such chunks have a negative number.

    Example:

        ages = [view.version - chunk.version for chunk in view.ready]

    Args:
        number: the chunk's position in the order of the run's prompts.
        num_samples: number of its samples.
        batch: number of the loader's batch that has its prompts.
        start: index of its first prompt in that batch.
        stop: index after its last prompt.
        rank: the trainer rank that gets the samples; only its generators may generate the chunk.
        generator: the number of the generator that generates the chunk.
        version: version of the generator's weights at the chunk's start; no token is older.
        attempt: number of batches that the step generated before; the noise depends on it.
        uids: the uid of each prompt.
        rows: one row per sample, until the samples are finished.
        samples: the finished samples.
        metrics: metrics from the generator's scoring.
    """

    number: int
    num_samples: int
    batch: int = 0
    start: int = 0
    stop: int = 0
    rank: int = ANY_RANK
    generator: int = 0
    version: int = 0
    attempt: int = 0
    uids: list[str] = field(default_factory=list)
    rows: DataProto | None = field(default=None, repr=False)
    samples: DataProto | None = field(default=None, repr=False)
    metrics: Metrics = field(default_factory=dict)

    @property
    def is_validation(self) -> bool:
        """True if the chunk belongs to a validation."""
        return self.number < 0

    @property
    def names(self) -> list[tuple[str, int]]:
        """The uid and index of each sample."""
        size = self.num_samples // max(len(self.uids), 1)
        return [(uid, index) for uid in self.uids for index in range(size)]

    def place(self) -> dict[str, int]:
        """Return the position of the chunk's prompts, ready for JSON."""
        names = "number", "num_samples", "batch", "start", "stop", "rank"
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return a finished chunk's prompts, generator and version, but not its samples."""
        fields = {"generator": self.generator, "version": self.version, "uids": self.uids}
        return {"piece": self.place(), **fields}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], folder: Path | None) -> SampleChunk:
        """Return the chunk of a `state_dict`, with its samples if they are in the folder."""
        fields = {name: state[name] for name in ("generator", "version", "uids")}
        chunk = cls(**state["piece"], **fields)
        path = None if folder is None else folder / f"{chunk.number}.safetensors"
        if path is not None and path.is_file():
            chunk.samples = DataProto.load_from_disk(path)
        return chunk


def num_samples_of(chunks: Iterable[SampleChunk]) -> int:
    """Return the number of samples in these chunks."""
    return sum(chunk.num_samples for chunk in chunks)


@dataclass(frozen=True)
class BufferView:
    """Chunks to choose from, and the state of the run, as a sampler sees them.

    If trainer ranks have their own generators, each has its own view: its part of a batch.

    Example:

        is_full = sum(chunk.num_samples for chunk in view.ready) >= view.num_samples

    Args:
        ready: finished chunks, in the order in which they arrived.
        in_progress: chunks that are being generated.
        num_samples: number of samples in a batch.
        version: version of the trainer's weights.
        max_staleness: `async_training.max_staleness`, in weight versions.
        samples_per_version: number of samples that are trained on per version.
        seed: the seed of this batch: the run's seed and the number of the batch.
        orphaned: chunks of a lost generator that wait for another generator.
        samples_left_in_version: samples that later batches need before the next version.
        drop_older_than: `async_training.drop_older_than`, if it is set.
    """

    ready: Sequence[SampleChunk]
    in_progress: Sequence[SampleChunk]
    num_samples: int
    version: int
    max_staleness: int
    samples_per_version: int
    seed: Sequence[int]
    orphaned: Sequence[SampleChunk] = ()
    samples_left_in_version: int = 0
    drop_older_than: int | None = None

    def samples_until_stale(self, version_made: int) -> int:
        """Count the samples that later batches use until those of `version_made` are too stale."""
        versions_left = version_made + self.max_staleness - self.version
        return max(self.samples_left_in_version + versions_left * self.samples_per_version, 0)


@dataclass
class SelectedBatch:
    """The chunks of a batch in order, and chunks to drop with the reasons.

    Example:

        SelectedBatch(select_chunks(view.ready, view.num_samples))

    Args:
        selected: chunks with exactly `view.num_samples` samples; empty if the trainer has to wait.
        dropped: (chunk, reason in words) for each chunk that is never trained on.
    """

    selected: list[SampleChunk] = field(default_factory=list)
    dropped: list[tuple[SampleChunk, str]] = field(default_factory=list)


class BatchSampler(ABC):
    """Chooses the chunks of a batch. It has no state: the same view gives the same batch.

    Example:

        class NewestFirst(BatchSampler):
            def choose(self, view):
                newest = sorted(view.ready, key=lambda chunk: -chunk.version)
                in_time = urgent_chunks_first(view, newest) or ()
                return SelectedBatch(select_chunks(in_time, view.num_samples))
    """

    @abstractmethod
    def choose(self, view: BufferView) -> SelectedBatch:
        """Choose the next batch; an empty batch means that the trainer waits.

        Args:
            view: the chunks that are `ready` or `in_progress`, the `num_samples` of a batch, and
                the `version` of the trainer's weights.
        """


class SamplerError(VerlLikeError, RuntimeError):
    """A sampler chose chunks that do not form a batch, or that are too stale."""


def chosen(sampler: BatchSampler, view: BufferView) -> SelectedBatch:
    """Return the sampler's choice; raise unless it is empty, or one batch that is not too stale."""
    batch, name = sampler.choose(view), type(sampler).__name__
    num_samples = num_samples_of(batch.selected)
    if batch.selected and num_samples != view.num_samples:
        raise SamplerError(
            f"the sampler {name} selected {num_samples} samples for a batch of "
            f"{view.num_samples}. Select with verl_like.extend.select_chunks, which returns "
            "exactly one batch, or nothing."
        )
    oldest = min((chunk.version for chunk in batch.selected), default=view.version)
    if view.version - oldest > view.max_staleness:
        raise SamplerError(
            f"the sampler {name} selected samples of version {oldest} for the update of version "
            f"{view.version}, but async_training.max_staleness={view.max_staleness}. The sampler "
            "held these samples back too long. Sort with verl_like.extend.urgent_chunks_first, "
            "so that a batch gets the samples that it must contain."
        )
    return batch


def _check(sampler: Any, subject: str) -> None:
    """Reject an object that is not a sampler class, or that needs arguments."""
    if not (isinstance(sampler, type) and issubclass(sampler, BatchSampler)):
        raise ConfigError(
            f"{subject} is not a sampler class: make it a subclass of "
            "verl_like.extend.BatchSampler."
        )
    check_methods(sampler, BatchSampler, subject)
    check_call(sampler, subject, CallSignature())


BATCH_SAMPLERS: Registry[type[BatchSampler]] = Registry(
    "sampler", _check, "subclass of BatchSampler"
)
"""Names for `async_training.sampler`.

    @BATCH_SAMPLERS.register("first_ready")
    class FirstReady(BatchSampler):
        def choose(self, view):
            return SelectedBatch(select_chunks(view.ready, view.num_samples))

The run makes a sampler without arguments.
"""


def select_chunks(chunks: Iterable[SampleChunk], num_samples: int) -> list[SampleChunk]:
    """Return the first chunks that fit and add up to exactly `num_samples` samples, or none.

    Example:

        batch = SelectedBatch(select_chunks(view.ready, view.num_samples))
    """
    taken: list[SampleChunk] = []
    for chunk in chunks:
        if chunk.num_samples <= num_samples:
            taken.append(chunk)
            num_samples -= chunk.num_samples
    return [] if num_samples else taken


def urgent_chunks_first(view: BufferView, ready: Sequence[SampleChunk]) -> list[SampleChunk] | None:
    """Move chunks that would be too stale for the next batch to the front of `ready`.

    The samples that remain of every version can then still be used in time. Return None if a chunk
    that must be in this batch is still being generated.

    Example:

        in_time = urgent_chunks_first(view, view.ready) or ()
        batch = SelectedBatch(select_chunks(in_time, view.num_samples))
    """
    head: dict[int, SampleChunk] = {}
    for version_made in sorted({chunk.version for chunk in [*ready, *view.in_progress]}):
        due = [
            chunk for chunk in ready if chunk.version <= version_made and chunk.number not in head
        ]
        coming = [chunk for chunk in view.in_progress if chunk.version <= version_made]
        num_left = num_samples_of(due) + num_samples_of(coming)
        for chunk in due:
            if num_left <= view.samples_until_stale(version_made):
                break
            head[chunk.number] = chunk
            num_left -= chunk.num_samples
        if num_left > view.samples_until_stale(version_made):
            return None
    return [*head.values(), *(chunk for chunk in ready if chunk.number not in head)]


def _in_time(view: BufferView, ready: Sequence[SampleChunk]) -> SelectedBatch:
    """Choose chunks that would be too stale for the next batch, then the first of the others."""
    ordered = urgent_chunks_first(view, ready)
    return SelectedBatch(select_chunks(ordered or (), view.num_samples))


@BATCH_SAMPLERS.register("in_order")
class InOrder(BatchSampler):
    """Uses prompts in order, so it waits for slow chunks."""

    def choose(self, view: BufferView) -> SelectedBatch:
        """Choose the chunks with the lowest numbers, once all of them are finished."""
        taken = select_chunks(sorted(view.ready, key=lambda chunk: chunk.number), view.num_samples)
        waits = any(
            chunk.number < taken[-1].number
            for chunk in [*view.in_progress, *view.orphaned]
            if taken
        )
        return SelectedBatch() if waits else SelectedBatch(taken)


@BATCH_SAMPLERS.register("random")
class RandomOrder(BatchSampler):
    """Chooses chunks at random, seeded by the run's seed and the batch's number."""

    def choose(self, view: BufferView) -> SelectedBatch:
        """Choose chunks that would become too stale, then random finished ones."""
        order = np.random.default_rng(list(view.seed)).permutation(len(view.ready))
        return _in_time(view, [view.ready[place] for place in order])


@BATCH_SAMPLERS.register("ready_first")
class ReadyFirst(BatchSampler):
    """Uses chunks as they finish.

    Long responses finish later, so the lengths in a batch are biased.
    """

    def choose(self, view: BufferView) -> SelectedBatch:
        """Choose chunks that would become too stale, then those that finished first."""
        return _in_time(view, view.ready)


@BATCH_SAMPLERS.register("version_window")
class VersionWindow(BatchSampler):
    """Drops chunks that are too old, and uses the oldest of the others first."""

    def choose(self, view: BufferView) -> SelectedBatch:
        """Choose the chunks within the window, oldest version first; drop the chunks outside."""
        window = view.max_staleness if view.drop_older_than is None else view.drop_older_than
        inside = sorted(view.ready, key=lambda chunk: chunk.version)
        dropped = [chunk for chunk in inside if chunk.version < view.version - window]
        taken = select_chunks(inside[len(dropped) :], view.num_samples)
        return SelectedBatch(taken, [(chunk, f"older than {window} versions") for chunk in dropped])
