"""A callback that kills workers, loses weights and delays calls, each in one step."""

from __future__ import annotations

import time
from typing import Any

LOSSY = "role_workers.actor=tests.workers.weights.lossy.LossyActor"
"""The setting with which `Disturb` can lose weights."""


class Disturb:
    """Disturbs steps of a run; a repeated step is not disturbed again."""

    def __init__(self, disturbances: dict[int, tuple[str, str]]) -> None:
        """Take, by step, "kill", "delay" or "lose", and the role."""
        self.left = dict(disturbances)

    def on_step_begin(self, trainer: Any) -> None:
        kind, role = self.left.pop(trainer.global_step, ("", ""))
        if kind == "kill":
            trainer.groups[role].transport.kill(0)
        elif kind == "delay":
            trainer.groups[role].execute_func_rank_zero.remote(time.sleep, 0.05)
        elif kind == "lose":
            trainer.groups[role].drop_next_bucket()
