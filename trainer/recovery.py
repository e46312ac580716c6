"""Recovery of a run's groups: those that a step lost, and those whose nodes Ray drains.

Lost groups whose roles have no state are replaced, and the step goes on:

    batch, metrics = recovery.stage("score", trainer.score, batch)    # again, with new groups
    samples = recovery.generate(prompts)                # only the samples that were lost, again

After any other loss the run ends or, with `trainer.max_restarts`, another attempt begins
(`trainer.restarts`). Between two steps, groups leave drained nodes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from trainer.restarts import TURN_S, NodeDrainedError
from verl_like.batch.protocol import DataProto
from verl_like.errors import (
    InsufficientResourcesError,
    LostSamplesError,
    PlacementError,
    WorkerDiedError,
)
from workers.rollout.client import RolloutClient, Submission

Result = TypeVar("Result")
logger = logging.getLogger(__name__)


class Recovery:
    """Runs the stages and generations of one trainer, and replaces the groups that they lose."""

    def __init__(self, trainer: Any, send_weights: Callable[[], Any]) -> None:
        """`send_weights` updates a new rollout, which has the weights of its folder."""
        self._trainer, self._run, self.send_weights = trainer, trainer.run, send_weights

    def stage(self, name: str, stage: Callable[..., Result], *inputs: Any) -> Result:
        """Run a stage; if it loses groups and may be repeated, run it again with new groups."""
        try:
            return stage(*inputs)
        except WorkerDiedError as error:
            if name not in self._trainer.recipe.repeatable_stages:
                raise
            self._replace(error)
            return stage(*inputs)

    def generate(self, prompts: DataProto) -> DataProto:
        """Return the samples of the role `rollout`; a new group generates those that were lost."""
        rollout = self._run.groups["rollout"]
        replace = self._new_rollout if self._can_replace("rollout") else None
        return RolloutClient(rollout).generate(prompts, replace)

    def _new_rollout(self, error: LostSamplesError, submission: Submission) -> Any:
        """Replace the lost rollout, send it the current weights, and return it."""
        self._replace(error)
        self.send_weights()
        run, missing = self._run, len(submission.missing)
        run.restarts.note_samples(run.step, submission.num_samples, missing)
        return run.groups["rollout"]

    def _can_replace(self, role: str) -> bool:
        is_replaceable: bool = self._run.groups[role].transport.is_replaceable
        return is_replaceable and bool(self._run.restarts.has_attempts(self._run.step))

    def _replace(self, error: WorkerDiedError) -> None:
        """Restart the lost groups; their models are loaded from the model folders.

        Raise the error if a lost group cannot be replaced, or if none is lost.
        """
        groups, restarts, step = self._run.groups, self._run.restarts, self._run.step
        if not any(map(self._can_replace, groups)):
            raise error
        since, roles_of = time.monotonic(), groups.roles_of_pools()
        lost = {pool: roles_of[pool] for pool in groups.lost_pools(TURN_S)}
        replaceable = self._trainer.replaceable_roles()
        if not lost or not all(replaceable.issuperset(roles) for roles in lost.values()):
            raise error
        restarts.wait_for_next(error, step)
        try:
            for pool in lost:
                restarts.wait_for_capacity(partial(groups.restart, pool), since)
        except InsufficientResourcesError:
            raise
        except PlacementError as problem:
            error.add_note(str(problem))
            raise error from None
        seconds = time.monotonic() - since
        for pool, roles in lost.items():
            text = "group %s (%s) restarted after %.1f s; step %d continues."
            logger.warning(text, "+".join(roles), pool, seconds, step)
        groups.init_new_roles(self._trainer.init_arguments)


def leave_drained_nodes(loop: Any) -> None:
    """Save, and move the groups that are on nodes which Ray drains; raise if they have state.

    A checkpoint that would not be ready in time is not begun. Without room on other nodes, the
    run goes on until the nodes are gone.
    """
    from trainer.groups.cluster import can_move, pools_to_move

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
