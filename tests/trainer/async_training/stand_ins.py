"""A loader of numbered prompts and a buffer on it, for tests without models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from trainer.async_training.activity import Activity
from trainer.async_training.buffer import ExperienceBuffer
from trainer.async_training.config import AsyncConfig, AsyncSettings
from trainer.async_training.generators import Generator
from trainer.async_training.samplers import SampleChunk
from trainer.async_training.topology import generator_pool, generator_role
from trainer.observers.sample_log import tokens_by_sample
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import WorkerDiedError
from workers.rollout.sample import REQUEST


class NumberedPrompts:
    """`num_batches` batches of `size` prompts; prompt 5 of the run has the uid "5"."""

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


def config_of(
    *,
    chunk: int | None = 2,
    batch: int = 4,
    samples: int = 1,
    generators: int = 1,
    **async_training: Any,
) -> AsyncConfig:
    """Return a configuration with the bounds of the buffer and the generators."""
    config = AsyncConfig()
    config.data.train_batch_size, config.actor_rollout_ref.rollout.n = batch, samples
    settings = {
        "prompts_per_call": chunk,
        "generators": generators,
        "max_inflight_samples": 1000,
        **async_training,
    }
    config.async_training = AsyncSettings(**settings)
    config.role_mapping = {
        generator_role(generator): generator_pool(generator) for generator in range(generators)
    }
    config.resource_pool_spec = {generator_pool(generator): [1] for generator in range(generators)}
    return config


def make_buffer(num_batches: int | None = None, **settings: Any) -> ExperienceBuffer:
    """Return a buffer at version 1 of the weights, in a run of `num_batches` batches."""
    config = config_of(**settings)
    prompts = NumberedPrompts(config.data.train_batch_size, num_batches)
    buffer = ExperienceBuffer(config, prompts, Activity())
    buffer.publish(1)
    return buffer


def begin(buffer: ExperienceBuffer, generator: int = 0) -> SampleChunk:
    """Start a generator's next chunk, which must exist, and return it."""
    chunk = buffer.begin(generator, buffer.weights)
    assert chunk is not None
    return chunk


def finish(buffer: ExperienceBuffer, chunk: SampleChunk) -> SampleChunk:
    """Mark a chunk as generated and queued."""
    chunk.samples = chunk.rows
    buffer.put(chunk)
    return chunk


def may_begin(buffer: ExperienceBuffer, generator: int = 0, version: int | None = None) -> bool:
    """True if there is room for a generator's next chunk at this moment."""
    age = 0 if version is None else buffer.version - version
    chunk = buffer.chunks.offer(generator)
    return chunk is not None and buffer.chunks.has_room(chunk, age, buffer._demand)


def train(buffer: ExperienceBuffer, taken: list[SampleChunk], version: int) -> None:
    """Train on all samples, as rank 0."""
    for chunk in taken:
        assert chunk.samples is not None
        buffer.log.train(tokens_by_sample(chunk.samples))
    buffer.check()
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
    """A rollout group of one rank that makes responses of one token when `finish` is called."""

    world_size = 1

    def __init__(self) -> None:
        self.running: list[DataProto] = []
        self.generate_sequences = SimpleNamespace(collecting_ranks=lambda: [0])
        self.submit = SimpleNamespace(remote_on=lambda rank, rows: Answer(lambda: self.add(rows)))
        self.collect = SimpleNamespace(remote_on=lambda rank, *_: Answer(self.finished))

    def add(self, rows: DataProto) -> None:
        self.running.append(rows)

    def finished(self) -> DataProto | None:
        """The oldest submission."""
        rows = self.running.pop(0)
        ones = torch.ones(len(rows), 1)
        return rows.select([REQUEST]).union(DataProto.from_dict({"responses": ones}))


def columns_of(rows: DataProto, *_: str) -> DataProto:
    """Return the columns that a stand-in for a group reads."""
    return rows.select(["sample_index", "input_ids"], ["uid"])


def generator_of(
    buffer: ExperienceBuffer,
    group: Any,
    deliver: Callable[[int], int],
    losses: Callable[..., bool] = lambda *_: False,
    number: int = 0,
    **settings: Any,
) -> Generator:
    """Return a generator of that group."""
    trainer = SimpleNamespace(
        config=config_of(**({"generators": number + 1} | settings)),
        groups={generator_role(number): group},
        rollouts=SimpleNamespace(prompt_columns=columns_of),
    )
    weights: Any = SimpleNamespace(deliver=deliver)
    stays = lambda number: False  # noqa: E731
    places = SimpleNamespace(on_loss=losses, must_move=stays, must_leave=stays)
    return Generator(number, trainer, buffer, weights, places, Activity())
