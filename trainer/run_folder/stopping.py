"""The goals of a run (`trainer.stop_at`): it ends with the step that reaches one."""

from __future__ import annotations

from collections.abc import Mapping

from verl_like.errors import ConfigError, nearest


def reached_goal(metrics: Mapping[str, float], goals: Mapping[str, float]) -> str:
    """The first goal that is reached, in words; empty where none is.

    Metrics of a validation may be absent from a step, others must be there.
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
