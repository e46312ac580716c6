"""The coefficient of the entropy bonus, steered so that the policy keeps a given entropy.

`PPOTrainer.update` sends the coefficient with the batch, and shows the controller what entropy the
update found.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.config import ActorConfig

LARGEST_ERROR = 1.0
"""Nats by which one step counts at most: a policy far from its target does not jump."""
RANGE = 100.0
"""How far the coefficient goes from its first value, up and down: it stays able to come back."""


class TargetEntropyController:
    """A coefficient whose logarithm follows the distance to a target (SAC, arXiv 1812.05905).

    log c grows by lr x (target - entropy): an entropy below the target makes the bonus weigh more.
    """

    def __init__(self, first: float, target: float, lr: float) -> None:
        """Start at `first`, which is above 0."""
        self.value = first
        self.target, self.lr = target, lr
        self.bounds = first / RANGE, first * RANGE

    def update(self, entropy: float) -> dict[str, float]:
        """Move after an update whose tokens had this mean entropy; gives what the update used.

        An entropy of 0 is that of no tokens, or of no update, and moves nothing.
        """
        metrics = {"actor/entropy_coeff": self.value}
        if math.isfinite(entropy) and entropy > 0:
            error = min(max(self.target - entropy, -LARGEST_ERROR), LARGEST_ERROR)
            low, high = self.bounds
            self.value = min(max(self.value * math.exp(self.lr * error), low), high)
        return metrics

    def state_dict(self) -> dict[str, float]:
        """The coefficient, as `update_actor` gets it and a checkpoint keeps it."""
        return {"entropy_coeff": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's coefficient; one of a run without a controller has none."""
        self.value = state.get("entropy_coeff", self.value)


def get_entropy_controller(actor: ActorConfig) -> TargetEntropyController | None:
    """The controller that `actor.target_entropy` asks for; None where the coefficient stays."""
    if actor.target_entropy is None:
        return None
    return TargetEntropyController(
        actor.entropy_coeff, actor.target_entropy, actor.entropy_coeff_lr
    )
