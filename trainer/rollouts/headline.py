"""The numbers of a step on the console: how the policy learns, and how fast.

`trainer.run_folder.tracking` shows those that exist.
"""

from __future__ import annotations

from collections.abc import Mapping

KL_NAMES = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")
"""The KL to show: to the reference, or otherwise to the policy before the update."""
ROUNDING = 1e-8
"""A KL no further from 0 than this counts as 0."""
WATCHED = {
    "actor/entropy": "entropy",
    "response_length/mean": "length",
    "actor/pg_loss": "loss",
}
"""Further metrics of a step -> their names on the console."""


def headline(metrics: Mapping[str, float]) -> list[str]:
    """Return the reward, KL, entropy, length, loss and speed, as far as a recipe has them."""
    numbers = []
    if "critic/score/mean" in metrics:
        numbers.append(f"reward {metrics['critic/score/mean']:.4g}")

    kls = [metrics[name] for name in KL_NAMES if abs(metrics.get(name, 0.0)) > ROUNDING]
    if kls:  # a KL of 0 compares a policy with itself
        numbers.append(f"KL {kls[0]:.3g}")

    for name, shown in WATCHED.items():
        if name in metrics:
            numbers.append(f"{shown} {metrics[name]:.3g}")

    if metrics.get("perf/time_per_step", 0.0) > 0:
        speed = metrics["perf/total_num_tokens"] / metrics["perf/time_per_step"]
        numbers.append(f"{speed:.0f} tokens/s")
    return numbers
