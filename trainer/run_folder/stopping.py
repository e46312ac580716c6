"""The goals of a run (`trainer.stop_at`): the run ends with the step that reaches one of them."""

from __future__ import annotations

from collections.abc import Mapping

from verl_like.errors import ConfigError, nearest


def reached_goal(metrics: Mapping[str, float], goals: Mapping[str, float]) -> str:
    """Describe the first goal that is reached, or return "".

    Validation metrics may be missing from a step; other metrics must exist.
    """
    for name, goal in goals.items():
        if name not in metrics and not name.startswith("val"):
            raise ConfigError(
                f"trainer.stop_at names {name!r}, which no step has.{nearest(name, metrics)}"
            )
        if name in metrics and metrics[name] >= goal:
            return (
                f"{name}={metrics[name]:.4g} has reached {goal:g}, the run ends here "
                "(trainer.stop_at)"
            )
    return ""
