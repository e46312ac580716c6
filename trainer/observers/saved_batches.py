"""Observers that save a step's batches: for a replay, as text, and as a record to compare.

`batches/` in the run folder has the batch of a step as each stage gets it:

    <run folder>/batches/<step>/score.safetensors, estimate.safetensors, update.safetensors

These files are written if `trainer.batch_steps_to_keep` is set; `verl-like replay` uses them to run
a stage again without generation. `rollouts/` has the samples of a step as text, with scores and
other numbers. `record/` is what `verl-like bisect` compares. The sampled tokens are checked, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.keys import flat_config
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from verl_like.record import Recorder
from workers.config.conditions import ACTOR
from workers.rollout.sample import LENGTH_LIMIT, check_sample_hashes

BATCHES_FOLDER = "batches"
STAGES = "score", "estimate", "update"
"""The stages that take a batch, in order."""


def batch_file(run_folder: Path, step: int, stage: str) -> Path:
    """Return the file of a stage's input batch."""
    return run_folder / BATCHES_FOLDER / str(step) / f"{stage}.safetensors"


class SavedBatches:
    """Saves the batches of the newest steps, as many as `trainer.batch_steps_to_keep`."""

    def __init__(self, config: Any) -> None:
        self._run_folder = Path(config.trainer.default_local_dir)
        self._num_steps = config.trainer.batch_steps_to_keep

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Save the input batch of the stage."""
        if stage in STAGES and batch is not None:
            self.save(stage, batch, trainer.global_step)

    def save(self, stage: str, batch: DataProto, step: int) -> None:
        """Write the stage's file; with a step's first file, delete the files of an old step."""
        if not self._num_steps:
            return
        path = batch_file(self._run_folder, step, stage)
        if stage == STAGES[0]:
            too_old = batch_file(self._run_folder, step - self._num_steps, stage).parent
            shutil.rmtree(too_old, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        batch.save_to_disk(path)


class DrawCheck:
    """Raises `BatchError` if a stage or hook has changed sampled tokens."""

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Check the input of the update."""
        if stage == "update" and batch is not None:
            self._metrics = check_sample_hashes(batch)

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Add the number of verified samples to the metrics."""
        metrics |= self._metrics
        self._metrics = {}


class WrittenSamples:
    """Writes the samples of every step."""

    def __init__(self) -> None:
        self._waiting: DataProto | None = None
        """The samples of the step, until they are written."""
        self._metrics: dict[str, float] = {}

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Remember the samples with their rewards and advantages."""
        if stage == "update":
            self._waiting = batch

    def on_update(self, trainer: Any, batch: DataProto) -> None:
        """Write the samples while the workers compute."""
        self._write(trainer)

    def on_stage_end(self, trainer: Any, stage: str, result: Any) -> None:
        """Write the samples now if a user's update did not call `on_update`."""
        if stage == "update":
            self._write(trainer)

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Add the metrics of the samples."""
        metrics |= self._metrics
        self._metrics = {}

    def _write(self, trainer: Any) -> None:
        batch, self._waiting = self._waiting, None
        if batch is not None:
            fields = None if trainer.origins is None else trainer.origins.fields(batch)
            trainer.rollouts.write("rollouts", batch, fields)
            metrics_of = trainer.recipe.sample_metrics
            self._metrics = metrics_of(batch, use_critic="critic" in trainer.groups)


RECORD = "record"
COLUMNS = (
    *("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs"),
    *("ref_log_prob", "values", "token_level_scores", "token_level_rewards", "advantages"),
    *("returns", "policy_version", "rollout_is_weights"),
)
"""Columns that keep their names in the record."""
NUMBERS = ("pg_loss", "kl_loss", "grad_norm", "lr")


class RecordedSteps:
    """Writes the newest steps, as many as `trainer.record` says; `all` keeps every step."""

    def __init__(self, config: Any) -> None:
        record = config.trainer.record
        if record != "all" and not record.isdecimal():
            raise ConfigError(f"trainer.record={record}: use `all`, or a number of steps.")
        self._config = config
        self._folder = f"{config.trainer.default_local_dir}/{RECORD}"
        self._arrays: dict[str, np.ndarray] = {}

    def on_train_begin(self, trainer: Any) -> None:
        """Begin the record with the weights of the beginning, as step 0."""
        self._settings = flat_config(self._config)
        self._recorder = Recorder(self._folder, "verl-like", self._settings)
        norms = norms_of(trainer)
        if trainer.global_step == 0:
            weights = {name: norms[name] for name in ("weight_norms", "weight_projections")}
            self._recorder.step(0, **weights)

    def on_update(self, trainer: Any, batch: DataProto) -> None:
        """Take the columns while the workers compute."""
        self._arrays = arrays_of(batch)

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Write the step, and delete the file of the oldest."""
        arrays, self._arrays = self._arrays, {}
        step, numbers = trainer.global_step, numbers_of(metrics, self._settings)
        self._recorder.step(step, arrays, **numbers, **norms_of(trainer))
        if self._config.trainer.record != "all":
            oldest = step - int(self._config.trainer.record)
            (self._recorder.folder / f"{oldest}.safetensors").unlink(missing_ok=True)


def arrays_of(batch: DataProto) -> dict[str, np.ndarray]:
    """Return the arrays of a record from the batch of an update."""
    objects, width = batch.non_tensor_batch, batch.padded("responses").shape[1]
    arrays = {name: batch.padded(name).numpy() for name in COLUMNS if name in batch.columns}
    arrays["truncated"] = np.array([end == LENGTH_LIMIT for end in objects["finish_reason"]])
    return arrays | samples_of(batch.padded("attention_mask"), width, objects["uid"])


def samples_of(attention_mask: Any, width: int, uids: Iterable[Any]) -> dict[str, np.ndarray]:
    """Return where the tokens of prompts and responses are, and the number of each row's prompt."""
    inside, numbers = attention_mask.bool().numpy(), dict[Any, int]()
    return {
        "prompt_mask": inside[:, :-width],
        "response_lengths": inside[:, -width:].sum(1),
        "group": np.array([numbers.setdefault(uid, len(numbers)) for uid in uids]),
    }


def numbers_of(metrics: Mapping[str, float], config: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record from the metrics of a step."""
    named = {name: metrics[f"actor/{name}"] for name in NUMBERS if f"actor/{name}" in metrics}
    if "pg_loss" in named:
        kl, entropy = named.get("kl_loss", 0.0), metrics.get("actor/entropy", 0.0)
        named["loss"] = named["pg_loss"] + config[f"{ACTOR}.kl_loss_coef"] * kl
        if config[f"{ACTOR}.entropy_coeff"]:
            coefficient = metrics.get("actor/entropy_coeff", config[f"{ACTOR}.entropy_coeff"])
            named["loss"] -= coefficient * entropy
    return named


def norms_of(trainer: Any) -> dict[str, dict[str, float]]:
    """Return norms of the policy's weights, gradients and moments, by the weights' names."""
    norms: dict[str, dict[str, float]] = {}
    for of_rank in trainer.groups["actor"].norms():
        for kind, numbers in of_rank.items():
            norms.setdefault(kind, {}).update(numbers)
    return norms
