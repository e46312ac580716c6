"""Validation with a moving average of the policy's weights: `actor.ema_decay`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workers.config import ActorConfig


@contextmanager
def averaged_weights(config: ActorConfig, actor: Any, sync: Callable[[], Any]) -> Iterator[None]:
    """Within, the rollout generates with the average; after, with the policy's own weights again.

    `actor` is the actor's group. Each way is a `sync` with a weight version of its own, so no
    sample is taken for another's.
    """
    if config.ema_decay is None:
        yield
        return

    actor.use_average(True)
    try:
        sync()
        yield
    finally:
        actor.use_average(False)
        sync()
