"""PPO runs whose workers are killed on purpose, at a stage of a step."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.integration.runs import overrides
from trainer import load_config, recovery, run
from trainer.ppo.stages import PPOTrainer
from verl_like.errors import WaitTimeoutError

SHORT = ("data.train_batch_size=4", "data.max_response_length=4", "trainer.total_training_steps=3")
ROLES = ("actor", "critic", "rollout", "ref")


Kills = dict[tuple[int, str], tuple[str] | tuple[str, int]]
"""(step, stage) -> role, and the rank if it is not the last."""


class Killing(PPOTrainer):
    """Kills the process of a role, by the step and its stage."""

    kills: ClassVar[Kills] = {}
    pids: ClassVar[list[dict[str, int]]] = []
    """Of every role, when a step begins."""
    late: ClassVar[tuple[int, str] | None] = None
    """Here a call is late, too."""

    def on_step_begin(self) -> None:
        self.pids.append({role: pid_of(self, role) for role in ROLES})
        self.kill("begin")

    def score(self, batch: Any) -> Any:
        self.kill("score")
        return super().score(batch)

    def update(self, batch: Any) -> Any:
        self.kill("update")
        return super().update(batch)

    def kill(self, stage: str) -> None:
        here = self.global_step, stage
        if here in self.kills:
            os.kill(pid_of(self, *self.kills.pop(here)), signal.SIGKILL)
            if here == self.late:
                raise WaitTimeoutError("somebody did not finish")


def pid_of(trainer: Any, role: str, rank: int = -1) -> int:
    """Return the process of a rank, by default the last."""
    return int(trainer.groups[role].transport.started[rank].pid)


@dataclass(frozen=True)
class Killed:
    """The processes and metrics after a run whose workers were killed."""

    folder: Path
    pids: list[dict[str, int]]
    log: str


def killed(
    tiny: Path,
    folder: Path,
    recipe: Any,
    kills: Kills,
    *more: str,
    late: tuple[int, str] | None = None,
) -> Killed:
    """Do a short run with these kills; return its processes, metrics and warnings."""
    messages = logging.StreamHandler((folder / "log").open("w"))
    logging.getLogger("trainer").addHandler(messages)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recovery, "FIRST_WAIT_S", 0.01)
            patch.setattr(Killing, "kills", dict(kills))
            patch.setattr(Killing, "pids", [])
            patch.setattr(Killing, "late", late)
            run(load_config(overrides(tiny, folder, *SHORT, *more), recipe), Killing)
            assert not Killing.kills, "all of them happened"
            return Killed(folder, Killing.pids, (folder / "log").read_text())
    finally:
        logging.getLogger("trainer").removeHandler(messages)
        messages.stream.close()


def differing(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return the roles whose processes changed."""
    return [role for role in ROLES if before[role] != after[role]]
