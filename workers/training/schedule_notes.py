"""Notes on learning-rate schedules that leave weights unchanged or never reach their rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.training.optim import lr_factor, num_warmup_steps

if TYPE_CHECKING:
    from workers.config import OptimConfig


def schedule_notes(section: str, config: OptimConfig, total_steps: int) -> list[str]:
    """Return a note if no update call of a run has the rate `lr`, or if this rate is 0.

    `section` is the key of `config`, and `total_steps` the number of update calls.
    """
    if config.lr == 0:
        return [f"note: {section}.lr=0 changes no weight. Set a rate above 0 to train."]
    warmup = num_warmup_steps(config, total_steps)
    if not 0 < total_steps <= warmup:
        return []
    highest = lr_factor(total_steps - 1, total_steps, config)
    return [
        f"note: the warm-up takes {warmup:,} updates ({section}.lr_warmup_steps), but the run has "
        f"{total_steps:,}: the learning rate ends at {highest:.0%} of {section}.lr={config.lr:g}. "
        "Lower the warm-up, or train longer."
    ]
