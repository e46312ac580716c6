"""Recovery within a step: lost groups whose roles have no state are replaced, and the step goes on.

    batch, metrics = recovery.stage("score", trainer.score, batch)    # again, with new groups
    samples = recovery.generate(prompts)                # only the samples that were lost, again

After any other loss the run ends or, with `trainer.max_restarts`, another attempt begins
(`trainer.restarts`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from trainer.restarts import TURN_S
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
