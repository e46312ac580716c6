"""What the recipes that sample have in common."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trainer.ppo.config import PPOConfig
from trainer.rollouts.trainer import SamplingTrainer


def test_while_rewards_are_waited_for_the_loss_of_a_worker_is_asked_for() -> None:
    groups = SimpleNamespace(check_idle=lambda what: None)
    rewards: Any = SimpleNamespace(launch=lambda *given: given)
    trainer: Any = SimpleNamespace(config=PPOConfig(), groups=groups, rewards=rewards, call=None)
    *_, check = SamplingTrainer.launch_rewards(trainer, None)
    assert check is groups.check_idle
