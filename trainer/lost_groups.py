"""Restore lost groups, and wait until the cluster has room for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from trainer.config.schema import RunConfig
from trainer.groups.worker_groups import WorkerGroups
from verl_like.calls.deadlines import Deadlines, WaitClock
from verl_like.errors import InsufficientResourcesError, PlacementError, WorkerError

FIRST_MESSAGE_S = 1.0
"""Seconds of a wait for a node until the first message."""
logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def restart_groups(
    groups: WorkerGroups, replaceable: frozenset[str], restarts: Any, since: float, turn_s: float
) -> bool:
    """Restore the groups for another attempt; return whether that was possible.

    If not, the caller restarts all groups. Lost pools are restarted, on another node if their node
    is lost; `since` is when the failure was noticed. Living pools stay unchanged if all roles in
    their processes are `replaceable`. Other living pools are constructed again in their processes,
    or restarted if they have a replaceable role, because one process may not be able to build an
    engine twice. `restarts` are the run's `trainer.recovery.Restarts`.
    """
    lost, roles_of = groups.lost_pools(turn_s), groups.roles_of_pools()
    if not lost or len(lost) == len(roles_of):
        return False
    for pool, why in lost.items():
        logger.warning("pool %s is restarted, and the other pools keep running: %s", pool, why)
    try:
        for pool in lost:
            if pool in groups.config.optional_pools:
                groups.leave(pool)  # it joins again by itself
            else:
                restarts.wait_for_capacity(partial(groups.restart, pool), since)
        for pools in groups.pools_by_processes():
            stay = replaceable.issuperset(role for pool in pools for role in roles_of[pool])
            for pool in pools:
                if stay or pool in lost:
                    continue
                if replaceable.intersection(roles_of[pool]):
                    groups.restart(pool)
                else:
                    groups.construct_again(pool)
    except InsufficientResourcesError:
        raise  # a full restart would find no room either
    except (WorkerError, PlacementError) as error:
        logger.warning(
            "the lost group cannot be restarted by itself, so all groups are restarted: %s", error
        )
        return False
    return True


def wait_for_room(
    start: Callable[[], Result],
    config: RunConfig,
    summary: str,
    since: float,
    look_again: Callable[[], None],
) -> Result:
    """Return the result of `start` once the cluster has room for it.

    Raise InsufficientResourcesError if there is none within `timeouts.placement_s` after `since`.
    `summary` names the wait in messages. `look_again` pauses between attempts, or raises to end the
    wait.
    """
    limit_s = Deadlines.from_settings(config.timeouts).placement_s
    clock = WaitClock(summary, limit_s, FIRST_MESSAGE_S, since)
    while True:
        try:
            return start()
        except InsufficientResourcesError as error:
            if clock.is_over():
                raise InsufficientResourcesError(
                    f"{error} After {clock.age_s:.0f} s without another node "
                    f"(timeouts.placement_s={limit_s:g}) the run ends. Restore the node or add "
                    "another one, and run the same command: it resumes from the last checkpoint."
                ) from None
            clock.warn_if_old(partial("a node ({})".format, str(error).rstrip(".")))
        look_again()
