"""A run ends with the step that reaches its goal."""

from __future__ import annotations

import pytest

from trainer.run_folder.metrics import goal_message
from verl_like.errors import ConfigError


def test_a_goal_is_reached_at_its_value() -> None:
    goals = {"critic/score/mean": 0.5}
    assert goal_message({"critic/score/mean": 0.49}, goals) == ""
    assert goal_message({"critic/score/mean": 0.5}, goals).startswith(
        "critic/score/mean=0.5 has reached 0.5"
    )


def test_a_metric_that_no_step_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'critic/score/mea'.*critic/score/mean"):
        goal_message({"critic/score/mean": 1.0}, {"critic/score/mea": 0.5})
