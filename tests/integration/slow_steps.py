"""A PPO run with a slow part, in which it signals itself; run by `test_stop_signals.py`.

python -m tests.integration.slow_steps PART LOSS SIGNAL SETTINGS...
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack
from typing import Any

import pytest

from trainer import recovery
from trainer.ppo import recipe
from trainer.ppo.stages import PPOTrainer
from trainer.recipe_command import run_command
from trainer.run_state import Metrics

SLOW_S = 5.0
"""Longer than the time after which Ray's own handler of SIGTERM would abort the process."""
LOST_IN, SIGNALED_IN = 2, 3
"""The step that loses a process, and the step with the signal if it comes in a step."""


class SlowTrainer(PPOTrainer):
    """Waits for a slow call in one part of the run, and gets the signal at its beginning."""

    part, loss, number = "", "", signal.SIGTERM
    has_loss = False
    """True until a process is lost."""

    @classmethod
    def prepare(cls, config: Any, at_end: ExitStack) -> tuple[Any, ...]:
        inputs = super().prepare(config, at_end)
        if cls.part == "prepare" and not cls.has_loss:
            if config.trainer.backend == "ray":
                import ray

                while not ray.is_initialized():
                    time.sleep(0.01)
                time.sleep(0.1)
            cls.send_signal()
            time.sleep(SLOW_S)
        return inputs

    @classmethod
    def send_signal(cls) -> None:
        print("signal", flush=True)
        if cls.number == signal.SIGINT:  # a terminal sends it to all processes of the command
            os.killpg(0, cls.number)
        else:
            os.kill(os.getpid(), cls.number)

    def be_slow(self, part: str) -> None:
        if part != self.part or self.has_loss:
            return
        self.send_signal()
        self.groups["actor"].execute_func_rank_zero(time.sleep, SLOW_S)

    def before_steps(self) -> None:
        self.be_slow("init")
        super().before_steps()

    def step(self) -> Metrics:
        if self.has_loss and self.global_step == LOST_IN:
            type(self).has_loss = False
            self.lose_a_process()
        if self.global_step == SIGNALED_IN:
            self.be_slow("step")
        return super().step()

    def lose_a_process(self) -> None:
        if self.loss == "head":
            from tests.verl_like.broken_cluster import daemon

            pid = daemon("gcs_server")
        else:
            pid = self.groups["actor"].execute_func_rank_zero(os.getpid)
        os.kill(pid, signal.SIGKILL)
        self.groups["actor"].execute_func_rank_zero(time.sleep, 60)

    def validation_metrics(self) -> Metrics:
        self.be_slow("validation")
        return super().validation_metrics()

    def state_dict(self) -> dict[str, Any]:
        if self.global_step == SIGNALED_IN:
            self.be_slow("checkpoint")
        return super().state_dict()


def main(part: str, loss: str, number: str, *settings: str) -> None:
    """Run the command `verl-like ppo` with these settings."""
    SlowTrainer.part, SlowTrainer.loss = part, loss
    SlowTrainer.number, SlowTrainer.has_loss = signal.Signals[number], loss != "nothing"
    patch = pytest.MonkeyPatch()
    patch.setattr(recovery, "FIRST_WAIT_S", 0.01)
    if loss == "head":
        from tests.verl_like.broken_cluster import wait_less

        wait_less(patch)
    cls = f"trainer.cls={SlowTrainer.__module__}.{SlowTrainer.__qualname__}"
    run_command(recipe.PPO, [*settings, cls])


if __name__ == "__main__":
    from tests.integration import slow_steps  # the class that `trainer.cls` names

    slow_steps.main(*sys.argv[1:])
