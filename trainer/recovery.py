"""What a run keeps of its processes when it loses a worker.

A lost group whose roles hold no state of their own (rollout, frozen readers) is replaced within the
step by `replace_within_step`: the others keep what the step has made so far. After any other loss
`bring_back` makes the groups whole for another attempt, which loads the last checkpoint.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from trainer.groups.worker_groups import WorkerGroups
from trainer.restarts import Restarts
from verl_like.errors import NoRoomError, PlacementError, WorkerDiedError, WorkerError

TURN_S = 60.0
"""So long the other processes may go on with what they are doing; then they count as lost, too."""
logger = logging.getLogger(__name__)


def bring_back(
    groups: WorkerGroups, replaceable: frozenset[str], restarts: Restarts, since: float
) -> bool:
    """Make the groups whole, with roles as at the start of the run; False: none can be kept.

    Pools of `replaceable` roles alone stay as they are. Other living pools are constructed again in
    their own processes, but for those that such a role shares: an engine may not be had twice in
    one process. A pool whose node is lost moves to another, which is waited for while the rest
    stays; the failure was noticed at `since`.
    """
    lost, roles_of = groups.lost_pools(TURN_S), groups.roles_of_pools()
    if not lost or len(lost) == len(roles_of):
        return False
    for pool, why in lost.items():
        logger.warning("pool %s is started anew, the others stay: %s", pool, why)
    try:
        for pool in lost:
            restarts.when_there_is_room(partial(groups.restart, pool), since)
        for pools in groups.pools_by_processes():
            stay = replaceable.issuperset(role for pool in pools for role in roles_of[pool])
            for pool in pools:
                if stay or pool in lost:
                    continue
                if replaceable.intersection(roles_of[pool]):
                    groups.restart(pool)
                else:
                    groups.construct_again(pool)
    except NoRoomError:
        raise  # nor has the cluster room for all of them
    except (WorkerError, PlacementError) as error:
        logger.warning("the lost group cannot be brought back, so all are started anew: %s", error)
        return False
    return True


def replace_within_step(
    groups: WorkerGroups,
    replaceable: frozenset[str],
    restarts: Restarts,
    error: WorkerDiedError,
    step: int,
) -> None:
    """Start lost groups of `replaceable` roles anew; they have no models yet.

    Where another role is lost, or none, the error is raised.
    """
    since, roles_of = time.monotonic(), groups.roles_of_pools()
    lost = {pool: roles_of[pool] for pool in groups.lost_pools(TURN_S)}
    if not lost or not all(replaceable.issuperset(roles) for roles in lost.values()):
        raise error
    restarts.wait_for_next(error, step)
    try:
        for pool in lost:
            restarts.when_there_is_room(partial(groups.restart, pool), since)
    except NoRoomError:
        raise
    except PlacementError as problem:
        error.add_note(str(problem))
        raise error from None
    seconds = time.monotonic() - since
    for pool, roles in lost.items():
        names = "+".join(roles)
        logger.warning(
            "group %s (%s) is back after %.1f s; step %d goes on.", names, pool, seconds, step
        )
