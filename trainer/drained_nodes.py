"""Save and move a run between two steps if Ray drains nodes of its groups."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

from trainer.groups.cluster import can_move, pools_to_move
from trainer.restarts import NodeDrainedError

logger = logging.getLogger(__name__)


def leave_drained_nodes(loop: Any) -> None:
    """Save, and move the groups that are on nodes which Ray drains; raise if they have state.

    A checkpoint that would not be ready in time is not begun. Without room on other nodes, the
    run goes on until the nodes are gone.
    """
    trainer, run = loop.trainer, loop.trainer.run
    config, groups = run.config, run.groups
    pools = pools_to_move(config, groups.placement)
    pools = {pool: left_s for pool, left_s in pools.items() if pool not in config.child_pools}
    if not pools or not trainer.can_save:
        return
    roles, has_room = groups.roles_of_pools(), can_move(config, groups.placement, pools)
    if has_room and all(trainer.replaceable_roles().issuperset(roles[pool]) for pool in pools):
        _move(trainer, pools)
        return
    is_new, loop.leaving = not pools.keys() <= loop.leaving, set(pools)
    if not (has_room or is_new):
        return
    left_s, needs_s = min(pools.values()), sum(run.checkpoints.took_s.values())
    event = f"Ray drains nodes of {', '.join(pools)}"
    if left_s < math.inf:
        event += f", which are gone in {left_s:.0f} s"
    if run.step and not (run.checkpoints.is_enabled and needs_s < left_s):
        why = f"a checkpoint takes {needs_s:.0f} s (the last one)"
        if not run.checkpoints.is_enabled:
            why = "checkpoints are disabled (trainer.save_every_minutes=null)"
        if is_new:
            logger.warning("%s; step %d is not saved, because %s.", event, run.step, why)
        return
    if run.step:
        loop.save_now()
    if has_room:
        raise NodeDrainedError(f"{event}; the run moves to others after step {run.step}.")
    text = "%s, and no other node has room. Step %d is saved; the run goes on until then."
    logger.warning(text, event, run.step)


def _move(trainer: Any, pools: Iterable[str]) -> None:
    """Restart groups whose roles have no state on other nodes."""
    groups, began = trainer.groups, time.monotonic()
    for pool in pools:
        groups.restart(pool)
    groups.init_new_roles(trainer.init_arguments)
    if any("rollout" in groups.roles_of_pools()[pool] for pool in pools):
        trainer.recovery.send_weights()
    text = "%s moved in %.1f s, after step %d; no step is lost."
    logger.warning(text, ", ".join(pools), time.monotonic() - began, trainer.global_step)
