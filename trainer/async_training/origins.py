"""Track the generator of each sample of an asynchronous run, and the age of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from trainer.async_training.samplers import SampleChunk
from trainer.async_training.weights import WeightFeed
from trainer.observers.sample_log import SampleKey, SampleLog
from trainer.ppo.sampling import merge_attempts
from trainer.rollouts.samples import concat_rows
from trainer.run_state import Metrics, Run
from verl_like.batch.protocol import DataProto
from verl_like.errors import join_few
from workers.columns import count_ones, read_column

GENERATOR = "generator"
"""Column with the number of the generator that generated each sample."""


class Origins:
    """Tells observers where the samples of a step come from."""

    def __init__(self, num_trainers: int, log: SampleLog, weights: WeightFeed) -> None:
        """The rows of a batch go to `num_trainers` trainer ranks in equal chunks.

        `log` is the sample log to which the generators add their samples.
        """
        self._num_trainers, self.log, self._weights = num_trainers, log, weights
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the samples of the previous step."""
        self._uids: list[str] = []
        self._scoring: list[Metrics] = []
        """Metrics from the generators' scoring in this step."""
        self._num_tokens = 0

    def batch_of(self, chunks: list[SampleChunk]) -> DataProto:
        """Return the samples of these chunks in order, with the column `generator`."""
        chunks.sort(key=lambda chunk: (chunk.rank, chunk.number))
        samples = [chunk.samples for chunk in chunks if chunk.samples is not None]
        batch, sizes = concat_rows(samples), [len(rows) for rows in samples]
        batch.non_tensor_batch[GENERATOR] = np.repeat([chunk.generator for chunk in chunks], sizes)
        self._uids += [uid for chunk in chunks for uid in chunk.uids]
        self._scoring += [chunk.metrics for chunk in chunks]
        self._num_tokens += int(count_ones(batch, "response_mask").sum())
        return batch

    def sampling_metrics(self) -> Metrics:
        """Return the metrics of the generators' scoring, and the number of tokens of this step."""
        return merge_attempts(self._scoring) | {"async/sampled_tokens": float(self._num_tokens)}

    @contextmanager
    def naming_samples(self, run: Run) -> Iterator[None]:
        """Add the uids of the step's samples to errors inside the block."""
        try:
            yield
        except Exception as error:
            known = f"is processing the samples of uid {join_few(self._uids)}"
            error.add_note(f"step {run.step} {known if self._uids else 'has no samples yet'}")
            raise

    def sample_stats(self, batch: DataProto) -> dict[SampleKey, dict[str, int]]:
        """Return the trainer rank, version and staleness of each sample, for the sample log."""
        trained_by = self._weights.version
        uids, indices = batch.non_tensor_batch["uid"], batch.padded("sample_index").tolist()
        keys = [(str(uid), index) for uid, index in zip(uids, indices, strict=True)]
        rows = zip(keys, self._trainer_ranks(batch), self._versions(batch).tolist(), strict=True)
        return {
            key: {"trainers": rank, "versions": version, "staleness": trained_by - version}
            for key, rank, version in rows
        }

    def fields(self, batch: DataProto) -> dict[str, list[Any]]:
        """Return the fields that an asynchronous run adds to `rollouts/N.jsonl`."""
        return {
            "generator": batch.non_tensor_batch[GENERATOR].tolist(),
            "trainer": self._trainer_ranks(batch),
            "trained_by_version": [self._weights.version] * len(batch),
        }

    def ages(self, batch: DataProto, trained_by: int) -> Metrics:
        """Return metrics of the age of samples, and of values from the generators' critics.

        `trained_by` is the version of the weights at the start of the update.
        """
        ages = trained_by - self._versions(batch)
        metrics = {
            f"async/staleness/{age}": float(count) for age, count in Counter(ages.tolist()).items()
        }
        if "value_version" in batch.columns:
            value_ages = trained_by - read_column(batch, "value_version")
            metrics["async/value_staleness/max"] = float(value_ages.max())
        return metrics | {
            "async/staleness/mean": float(ages.float().mean()),
            "async/staleness/max": float(ages.max()),
        }

    def _trainer_ranks(self, batch: DataProto) -> list[int]:
        size = -(-len(batch) // self._num_trainers)
        return [row // size for row in range(len(batch))]

    def _versions(self, batch: DataProto) -> Any:
        return read_column(batch, "policy_version")
