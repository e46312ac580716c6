"""Names that a key may have and that code registers, looked up when they are needed.

Each function imports what it asks when it is called: schemas are read without torch.
"""

from __future__ import annotations

from typing import Any

from verl_like.registry import Registry


def optimizers() -> Registry[Any]:
    """What `optim.optimizer` may name."""
    from workers.training.optim import OPTIMIZERS

    return OPTIMIZERS


def policy_losses() -> Registry[Any]:
    """What `policy_loss.loss_mode` may name."""
    from workers.losses.registry import POLICY_LOSSES

    return POLICY_LOSSES


def loss_aggregations() -> tuple[str, ...]:
    """What `loss_agg_mode` may name."""
    from workers.losses.aggregate import AGGREGATIONS

    return tuple(AGGREGATIONS)


def kl_estimators() -> tuple[str, ...]:
    """What names an estimator of a KL; a trailing + takes another one's gradient."""
    from workers.losses.kl import KL_ESTIMATORS

    return (*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS))
