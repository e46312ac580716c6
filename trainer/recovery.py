"""What a run keeps when it loses a worker: the processes that live, and the step where it can.

`bring_back` runs after an attempt that failed, and the next attempt goes on with what it gives.
Lost pools are started anew on their places. Then there are two ways:

    the lost roles can be replaced, or      the step is made again from its beginning, which the
    ranks that live hold their state, and   driver has in memory; no other role is touched
    none has begun to learn in this step
    else                                    every role goes back to the last checkpoint: those that
                                            live are constructed anew in their own processes

Where neither can be, every group is started anew, as if the command had been given again. A group
that is lost when others have moved, and is needed next, is replaced by `replace_within_step`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from trainer.groups.worker_groups import WorkerGroups
from trainer.replicas import Replicas, save_replicas
from trainer.restarts import Restarts
from trainer.run_folder.step_start import StepStart
from verl_like.errors import NoRoomError, PlacementError, WorkerDiedError, WorkerError

TURN_S = 60.0
"""So long the other processes may go on with what they are doing; then they count as lost, too."""
ABORT_S = 5.0
"""So long is waited for a generation to be broken off; it may go on then."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplaceableRoles:
    """What a recipe says of its roles; by default none can be replaced."""

    roles: frozenset[str] = frozenset()
    """Their state is in a model folder, or another role's weights: started anew, they go on."""
    with_processes: frozenset[str] = frozenset()
    """They leave something behind in their processes, which cannot be had a second time there."""
    replicas: Replicas = field(default_factory=dict)
    """Of roles that learn and whose whole state is held more than once."""
    generating: frozenset[str] = frozenset()
    """They sample, which `abort` breaks off."""


@dataclass(frozen=True)
class BroughtBack:
    """The groups are whole again, and the next attempt goes on with them."""

    pools: dict[str, list[str]]
    """Lost pools, with their roles."""
    step_start: StepStart | None
    """What the attempt goes on from; None: from the last checkpoint, or from the first step."""
    since: float
    """When the failure was noticed, as `time.monotonic` has it."""

    def log(self, step: int) -> None:
        """Say what is back and how long that took, once every role has its state after `step`."""
        _log_back(self.pools, self.since, f"the run goes on after step {step}")


def bring_back(
    groups: WorkerGroups,
    replaceable: ReplaceableRoles,
    step_start: StepStart | None,
    restarts: Restarts,
    since: float,
) -> BroughtBack | None:
    """Start what is lost anew, and have the rest ready to go on; None: no group can be kept.

    `step_start` is of the step that failed, where it had begun. A pool whose node is lost moves to
    another, which is waited for while the rest stays.
    """
    _abort_generation(groups, replaceable.generating)
    until = time.monotonic() + TURN_S
    lost = groups.lost_pools(TURN_S)
    roles_of = groups.roles_of_pools()
    if not lost:
        return None
    step_start = _whole_start(groups, replaceable, step_start, list(lost), until)
    if step_start is None and len(lost) == len(roles_of):
        return None
    for pool, why in lost.items():
        logger.warning("pool %s is started anew, the others stay: %s", pool, why)

    try:
        for pool in lost:
            restarts.when_there_is_room(partial(groups.restart, pool), since)
        if step_start is None:
            _make_empty(groups, replaceable, set(lost))
    except (WorkerError, PlacementError) as error:
        if step_start is not None and step_start.replicas is not None:
            step_start.replicas.drop()
        if isinstance(error, NoRoomError):
            raise  # nor has the cluster room for all of them
        logger.warning("the lost group cannot be brought back, so all are started anew: %s", error)
        return None
    return BroughtBack({pool: roles_of[pool] for pool in lost}, step_start, since)


def _whole_start(
    groups: WorkerGroups,
    replaceable: ReplaceableRoles,
    step_start: StepStart | None,
    lost: list[str],
    until: float,
) -> StepStart | None:
    """The step's beginning with the state of all roles then; None where that is not to be had."""
    if step_start is None or groups.changed_roles() - replaceable.roles:
        return None
    roles = [role for pool in lost for role in groups.roles_of_pools()[pool]]
    learning = [role for role in roles if role not in replaceable.roles]
    if not learning:
        return replace(step_start, replicas=None)
    if not replaceable.replicas.keys() >= set(learning):
        return None
    saved = save_replicas(groups, learning, replaceable.replicas, until)
    return None if saved is None else replace(step_start, replicas=saved)


def _abort_generation(groups: WorkerGroups, roles: Iterable[str]) -> None:
    """End what is being sampled: nobody waits for it any more, but others would, for their turn."""
    for role in roles:
        with suppress(WorkerError):  # of ranks that are gone, or hang
            groups[role].abort.remote().get(ABORT_S)


def replace_within_step(
    groups: WorkerGroups,
    roles: frozenset[str],
    restarts: Restarts,
    error: WorkerDiedError,
    step: int,
) -> None:
    """Start lost groups of these `roles` anew, while the others keep what the step has made so far.

    Where another role is lost, or none, the error is raised. The new ones have no models yet.
    """
    since, roles_of = time.monotonic(), groups.roles_of_pools()
    lost = {pool: roles_of[pool] for pool in groups.lost_pools(TURN_S)}
    if not lost or not all(roles.issuperset(its_roles) for its_roles in lost.values()):
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
    _log_back(lost, since, f"step {step} goes on")


def _log_back(pools: dict[str, list[str]], since: float, then: str) -> None:
    seconds = time.monotonic() - since
    for pool, roles in pools.items():
        names = "+".join(roles)
        logger.warning("group %s (%s) is back after %.1f s; %s.", names, pool, seconds, then)


def _make_empty(groups: WorkerGroups, replaceable: ReplaceableRoles, lost: set[str]) -> None:
    """Have the pools that live as at the start of the run, for a checkpoint to be loaded.

    Roles that hold nothing of their own stay as they are, unless another in their processes does.
    """
    roles_of = groups.roles_of_pools()
    for pools in groups.pools_by_processes():
        roles = {role for pool in pools for role in roles_of[pool]}
        if replaceable.roles >= roles:
            continue
        for pool in pools:
            if pool in lost:
                continue
            if replaceable.with_processes & set(roles_of[pool]):
                groups.restart(pool)
            else:
                groups.construct_again(pool)
