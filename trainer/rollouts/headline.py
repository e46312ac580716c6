"""The numbers of a step that the console shows: how it learns, and how fast.

`trainer.run_folder.tracking` shows them, as far as there are any.
"""

from __future__ import annotations

from collections.abc import Mapping

KL_NAMES = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")
"""The KL that is shown: to the reference, else to the policy before the update."""
ROUNDING = 1e-8
"""A KL that is no further from 0 is 0."""
WATCHED = {
    "actor/entropy": "entropy",
    "response_length/mean": "length",
    "actor/pg_loss": "loss",
}
"""Further numbers of a step -> what they are called on the console."""


def headline(metrics: Mapping[str, float]) -> list[str]:
    """Return the reward, KL, entropy, length, loss and speed, as far as a recipe has them."""
    numbers = []
    if "critic/score/mean" in metrics:
        numbers.append(f"reward {metrics['critic/score/mean']:.4g}")

    kls = [metrics[name] for name in KL_NAMES if abs(metrics.get(name, 0.0)) > ROUNDING]
    if kls:  # one that is 0 is of a policy held against itself
        numbers.append(f"KL {kls[0]:.3g}")

    for name, shown in WATCHED.items():
        if name in metrics:
            numbers.append(f"{shown} {metrics[name]:.3g}")

    if metrics.get("perf/time_per_step", 0.0) > 0:
        speed = metrics["perf/total_num_tokens"] / metrics["perf/time_per_step"]
        numbers.append(f"{speed:.0f} tokens/s")
    return numbers
