"""A trainer that stops after one step, and in that step, if so asked, makes one stage alone.

It is put over the run's own trainer class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.loop import Metrics, Trainer
from trainer.ppo.step import PPOTrainer
from trainer.run_folder.batches import STAGES, batch_file
from trainer.run_folder.timeline import Timeline
from trainer.run_folder.tracking import Tracking
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError


@dataclass
class Asked:
    """What is made again, and what came of it."""

    run_folder: Path
    step: int
    stage: str = ""
    """Empty: the whole step."""
    breaks: bool = False
    """Whether the debugger is entered right before."""
    metrics: Metrics = field(default_factory=dict)
    """Those of the step, or of the stage alone."""


def replaying(trainer_cls: type[Trainer], asked: Asked) -> type[Trainer]:
    """The trainer's class, with an end after the step that is asked for."""
    if asked.stage:
        _check_stages(trainer_cls)

    class Replaying(trainer_cls):  # type: ignore[misc, valid-type]
        def step(self) -> Metrics:
            if self.global_step != asked.step:
                return super().step()  # type: ignore[no-any-return]
            if asked.stage:
                return one_stage(self, asked)
            if asked.breaks:
                breakpoint()  # noqa: T100 - `step` goes into the run's own step
            return super().step()  # type: ignore[no-any-return]

        def validation_is_due(self) -> bool:
            ends_early = bool(asked.stage) and self.global_step == asked.step
            return not ends_early and super().validation_is_due()

        def _next_step(self, tracking: Tracking, timeline: Timeline) -> str:
            reached = super()._next_step(tracking, timeline)
            if self.global_step == asked.step:
                return f"step {asked.step} has been made again"
            return reached  # type: ignore[no-any-return]

        def on_step_end(self, metrics: Metrics) -> None:
            super().on_step_end(metrics)
            if self.global_step == asked.step:
                asked.metrics = dict(metrics)

    Replaying.__qualname__ = trainer_cls.__qualname__
    return Replaying


def one_stage(trainer: PPOTrainer, asked: Asked) -> Metrics:
    """The stage, of the batch that the run kept, or of one that the stages before it make."""
    batch = stage_input(trainer, asked)
    stage = getattr(trainer, asked.stage)
    if asked.breaks:
        breakpoint()  # noqa: T100 - `step` goes into the stage, `batch` is what it gets
    result = stage(batch)

    if asked.stage == "update":
        return dict(result)
    batch, metrics = result
    following = STAGES[STAGES.index(asked.stage) + 1]
    trainer.batches.save(following, batch, trainer.global_step)
    return dict(metrics)


def stage_input(trainer: PPOTrainer, asked: Asked) -> DataProto:
    """What goes into the stage."""
    path = batch_file(asked.run_folder, asked.step, asked.stage)
    if path.is_file():
        return DataProto.load_from_disk(path)

    batch, _ = trainer.source.take()
    for stage in STAGES[: STAGES.index(asked.stage)]:
        batch, _ = getattr(trainer, stage)(batch)
    return batch


def _check_stages(trainer_cls: Any) -> None:
    """Stages are those of PPO's step."""
    if not issubclass(trainer_cls, PPOTrainer):
        raise ConfigError(
            f"--stage: a step of {trainer_cls.__qualname__} has no stages {', '.join(STAGES)}; "
            "they are those of verl-like ppo. Leave --stage out."
        )
    if trainer_cls.step is not PPOTrainer.step:
        raise ConfigError(
            f"--stage: {trainer_cls.__qualname__} has a step of its own, whose stages only it "
            "knows. Leave --stage out; --break stops before that step."
        )
