"""Run two small steps of a job on this machine's CPU, resume it for a third, and export its model.

    rehearse(config)        # `verl-like check --rehearse`

The job is the user's (`trainer.tools.rehearsal.small_job` says what is smaller). An error of the
run is raised as the run raises it, with a note that names the phase of the rehearsal. Everything is
written into a temporary folder, which is removed.
"""

from __future__ import annotations

import math
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from trainer.config.schema import RunConfig
from trainer.launch import run_steps, trainer_class
from trainer.rollouts.preflight import synthetic_responses
from trainer.run_folder.saved_model import find_saved_model
from trainer.tools.rehearsal.small_job import STEPS, class_of, small_config
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError, RewardError, WaitTimeoutError
from workers.config import has_environment

MOST_VALIDATION_ROWS, MOST_SCORED_ROWS = 8, 64
LIMIT_S = 600
"""Seconds after which a rehearsal that does not end is stopped."""
NOT_TRIED = (
    "GPUs and their memory, NCCL, kernels for GPUs, and several nodes",
    "the weights of your models, and whether they learn",
    "long responses and full batches",
)


class Watch:
    """Observer of the phases of a run, which looks at more rewards and numbers than the run."""

    def __init__(self, run: str, scores_rows: bool) -> None:
        self.run, self.phase, self._scores_rows = run, "before its first step", scores_rows
        self.validated = self.num_scored = 0

    def on_init_end(self, trainer: Any) -> None:
        """Try the rewards."""
        loader: Any = getattr(trainer, "loader", None)
        if self._scores_rows and hasattr(trainer, "rollouts") and hasattr(loader, "prompts"):
            self.phase = "as the reward scored the ground truths of further rows"
            self._score(trainer, loader.prompts)
        self.phase = "before its first step"

    def _score(self, trainer: Any, prompts: Any) -> None:
        """Score ground truths as responses with each reward function; raise if one fails."""
        rewards, width = trainer.rollouts.rewards, trainer.config.data.max_response_length
        parts = [part for part in rewards.parts if part.manager and part.config.kind == "function"]
        places = np.linspace(0, len(prompts) - 1, min(len(prompts), MOST_SCORED_ROWS)).astype(int)
        rows = prompts.rows[places].tolist()
        for part in parts:
            batch = synthetic_responses(prompts, rows, trainer.rollouts.tokenizer, width)
            scored = part.manager.remote(batch).result()
            if scored.note:
                raise ConfigError(f"{part.config.label}: {scored.note}")
            if scored.failures and part.config.on_failure != "skip":
                count = sum(failure.count for failure in scored.failures.values())
                texts = "".join(f"\n  {failure}" for failure in scored.failures.values())
                raise RewardError(
                    f"{part.config.label} failed for {count} of {len(rows)} rows, with the row's "
                    f"ground truth as response:{texts}"
                )
            self.num_scored = len(rows)

    def on_step_begin(self, trainer: Any) -> None:
        """Note the step."""
        self.phase = f"in step {trainer.global_step}"

    def on_stage_begin(self, trainer: Any, stage: str, batch: Any) -> None:
        """Note the stage."""
        self.phase = f"in the stage {stage!r} of step {trainer.global_step}"

    def on_validate_begin(self, trainer: Any) -> None:
        """Note the validation."""
        self.phase = f"in the validation after step {trainer.global_step}"

    def on_validate_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Note that the validation is over."""
        self.validated += 1
        self.phase = f"after the validation of step {trainer.global_step}"

    def on_step_end(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Reject skipped updates, losses that are not finite, and entries that are ignored."""
        step = trainer.global_step
        for name, value in metrics.items():
            if name.endswith("/num_ignored"):
                words = "rewards with entries that JSON cannot write. The log names them"
                raise ConfigError(f"{name} is {value:g} in step {step}: {words}.")
            is_loss = name.endswith(("loss", "grad_norm")) and not math.isfinite(value)
            if is_loss or (name.endswith("/skipped_steps") and value > 0):
                raise ConfigError(
                    f"{name} is {value:g} in step {step}: a loss or its gradient is not a finite "
                    "number. Look at the loss, the advantages and the rewards of this step."
                )
        self.phase = f"after step {step}, as its metrics and its checkpoint were written"


def rehearse(config: RunConfig) -> list[str]:
    """Rehearse the run, and return lines that say what was tried and what was not."""
    trainer_cls, began = trainer_class(config), time.monotonic()
    lines = []
    with tempfile.TemporaryDirectory(prefix="rehearsal_") as name, time_limit():
        folder = Path(name)
        with phase("as the small models were built"):
            small = small_config(config, folder)
        for run, steps in (("the run", STEPS), ("the resumed run", STEPS + 1)):
            watch = Watch(run, scores_rows=steps == STEPS)
            with phase(watch):
                part = replace_keys(small, {"trainer.total_training_steps": steps})
                result = run_steps(part, observers=[watch], shorten=with_short_validation)
            if not result.metrics:
                raise ConfigError(
                    f"the rehearsal ended {watch.phase}, without a step: there are no samples to "
                    "train on."
                )
            lines += describe_run(watch, [int(line["step"]) for line in result.metrics])
        if trainer_cls.recipe.exports_model(config):
            with phase("as the trained model was exported and loaded again"):
                export_and_load(folder)
            lines.append("export: the trained model was written, and transformers loads it")
    shown = [f"Rehearsal: passed in {time.monotonic() - began:.0f} s, on CPUs, with small models"]
    shown += [f"  {line}" for line in lines]
    shown += ["Not tried:", *(f"  {line}" for line in (*NOT_TRIED, *not_tried(config)))]
    return shown


def with_short_validation(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a trainer's inputs with few validation rows."""
    for item in inputs:
        prompts = getattr(item, "validation", None)
        if prompts is not None:
            prompts.rows = prompts.rows[:MOST_VALIDATION_ROWS]
    return tuple(item[:MOST_VALIDATION_ROWS] if isinstance(item, list) else item for item in inputs)


def describe_run(watch: Watch, steps: Sequence[int]) -> list[str]:
    """Return what a run did, by its observer and the numbers of its steps."""
    lines = [f"{watch.run}: steps to {max(steps)}, with a checkpoint of each"]
    if watch.num_scored:
        lines.append(f"reward: ground truths of {watch.num_scored} rows, and the responses")
    if watch.validated:
        lines.append(f"validation: {watch.validated} of at most {MOST_VALIDATION_ROWS} rows each")
    return lines


def not_tried(config: Any) -> list[str]:
    """Return what this run would do and its rehearsal did not."""
    lines = []
    if config.trainer.backend == "ray":
        lines.append("Ray: the processes were those of trainer.backend=local")
    if config.trainer.logger:
        lines.append(f"trainer.logger: {', '.join(config.trainer.logger)}")
    if config.trainer.resume_mode == "resume_path":
        lines.append(f"the start from trainer.resume_from_path={config.trainer.resume_from_path}")
    policy = getattr(config, "actor_rollout_ref", None)
    if policy is not None and policy.rollout.name == "vllm":
        lines.append("vLLM: the engine native or hf generated")
    if has_environment(config) and config.environment.tools:
        lines.append("tools: a model with random weights calls none")
    return lines


def export_and_load(folder: Path) -> None:
    """Export the newest checkpoint's model, and load it in transformers."""
    from workers.models.folder import read_hf_config

    checkpoint = max((folder / "run").glob("global_step_*"), key=lambda path: path.stat().st_mtime)
    out = folder / "exported"
    find_saved_model(checkpoint).export(out)
    cls = class_of(read_hf_config(out))
    _, report = cls.from_pretrained(out, dtype="auto", output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"the exported model lacks {len(missing)} weights of {cls.__name__}: "
            f"{', '.join(missing[:5])}. from_pretrained would make them random."
        )


@contextmanager
def phase(now: str | Watch) -> Iterator[None]:
    """Add the phase of the rehearsal to an error of the block."""
    try:
        yield
    except Exception as error:
        words = now if isinstance(now, str) else f"in {now.run}, {now.phase}"
        strict = " It allows no failed sample." if isinstance(error, RewardError) else ""
        error.add_note(f"The rehearsal failed {words}.{strict}")
        raise


@contextmanager
def time_limit(seconds: float = LIMIT_S) -> Iterator[None]:
    """Interrupt a block that hangs, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown place"
        raise WaitTimeoutError(
            f"the rehearsal did not end within {seconds:g} s; it was at {where}. A reward, an "
            "environment or a stage may wait for something that does not come."
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
