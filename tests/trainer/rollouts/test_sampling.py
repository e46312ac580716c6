"""Settings that all sampling recipes share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trainer.ppo.config import PPOConfig
from trainer.rollouts.rollouts import Rollouts


def test_a_wait_for_rewards_checks_for_lost_workers() -> None:
    groups = SimpleNamespace(check_idle=lambda what: None)
    rewards: Any = SimpleNamespace(launch=lambda *arguments: arguments)
    run = SimpleNamespace(groups=groups)
    trainer: Any = SimpleNamespace(config=PPOConfig(), run=run, call=None)
    *_, check = Rollouts(trainer, None, rewards).launch_rewards(None)  # type: ignore
    assert check is groups.check_idle
