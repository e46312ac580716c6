"""Recovery of a run that lost workers: within the step, or by another attempt.

A lost group whose roles have no state of their own (rollouts, models that do not change) is
replaced within the step, and the other groups continue it:

    batch, metrics = recovery.stage("score", trainer.score, batch)    # again, with new groups
    samples = recovery.generate(prompts)                # only the samples that were lost, again

After any other loss the run ends or, with `trainer.max_restarts`, another attempt begins, for which
`trainer.lost_groups` restores the groups. `Restarts` decides whether, when and with which state.
Between two steps, groups leave nodes that Ray drains.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainer.config.schema import RunConfig
from trainer.run_folder.folder import RESTARTS_FILE, describe_lost_steps, saved_steps
from trainer.run_folder.signals import StopSignals
from verl_like.batch.protocol import DataProto
from verl_like.config_key import replace_keys
from verl_like.errors import (
    InsufficientResourcesError,
    LostSamplesError,
    PlacementError,
    VerlLikeError,
    WaitTimeoutError,
    WeightSyncError,
    WorkerDiedError,
)
from verl_like.files import json_line
from verl_like.masking import mask_text
from workers.rollout.client import RolloutClient, Submission

logger = logging.getLogger(__name__)


class NodeDrainedError(VerlLikeError, RuntimeError):
    """The run leaves nodes that are drained; its state is in a checkpoint."""


LOSSES = (WorkerDiedError, WaitTimeoutError, WeightSyncError, NodeDrainedError)
"""Errors after which another attempt may succeed."""
MAX_STEP_FAILURES = 3
"""A step that fails this many times counts as the cause of the failures."""
FIRST_WAIT_S = 2.0
"""The pause before a restart, which doubles with every restart that makes no progress."""
LOOK_AGAIN_S = 1.0
"""Seconds between two checks while a run waits for a node."""
TURN_S = 60.0
"""Time for the other processes to finish their calls; after it they count as lost, too."""
Result = TypeVar("Result")
Config = TypeVar("Config", bound=RunConfig)


class Restarts:
    """The restarts of one run, recorded in `restarts.jsonl` of its folder."""

    def __init__(self, config: RunConfig, stop: StopSignals | None = None) -> None:
        """A request to `stop` ends every pause."""
        self._config, self._count = config, 0
        self._stop = stop or StopSignals()
        self._record = Path(config.trainer.default_local_dir) / RESTARTS_FILE
        self._failures: Counter[int] = Counter()
        self._failed_at = 0.0
        self._is_move = False
        self._last_failed = self._furthest = self._in_a_row = 0
        """The step that failed last, the furthest step, and the restarts without progress."""

    def begin(self, step: int, source: str) -> None:
        """Log that a further attempt begins after `step`, with the state of `source`.

        The first attempt of a run that begins at step 0 removes an earlier run's `restarts.jsonl`.
        """
        if self._is_move:
            self._is_move = False
        elif self._count:
            again = max(self._last_failed - 1 - step, 0)
            text = "the run restarted after %.1f s and resumes after step %d from %s; %s."
            seconds, lost = time.monotonic() - self._failed_at, describe_lost_steps(again)
            logger.warning(text, seconds, step, source, lost)
            self._write(self._last_failed, state_from=source, finished_steps_made_again=again)
        elif step == 0:
            self._record.unlink(missing_ok=True)

    def wait_for_next(self, error: VerlLikeError, step: int) -> None:
        """Pause before another attempt; raise the error if there is no other attempt.

        `step` is the step that failed; 0: the run failed before its first step.
        """
        self._failures[step] += 1
        self._failed_at = time.monotonic()
        reason = self._why_not(step, self._failures[step])
        if reason is not None:
            if reason:
                error.add_note(reason)
            raise error

        self._in_a_row = 0 if step > self._furthest else self._in_a_row + 1
        self._last_failed, self._furthest = step, max(self._furthest, step)
        seconds = FIRST_WAIT_S * 2**self._in_a_row
        self._count += 1
        text = "step %d failed: %s. Restart %d of %d (trainer.max_restarts) in %.0f s."
        most, problem = self._config.trainer.max_restarts, str(error).rstrip(".")
        logger.warning(text, step, problem, self._count, most, seconds)
        self._write(step, lost=mask_text(str(error).splitlines()[0]))
        self._pause(seconds)

    def note_move(self, error: NodeDrainedError, step: int) -> None:
        """Log that another attempt begins after this step, on other nodes; nothing has failed."""
        logger.warning("%s", error)
        self._is_move, self._failed_at = True, time.monotonic()
        self._write(step, moved=str(error))

    def wait_for_capacity(self, start: Callable[[], Result], since: float) -> Result:
        """Return the result of `start` once the cluster has room, possibly on another node.

        If this is a restart, wait for room until `timeouts.placement_s` after `since`, when the
        failure was noticed; a request to stop ends the wait. Raise InsufficientResourcesError if
        there is no room.
        """
        if not self._count:
            return start()

        def look_again() -> None:
            self._stop.end("while it waited for a node to replace a lost node")
            self._pause(LOOK_AGAIN_S)

        from trainer.lost_groups import wait_for_room

        return wait_for_room(start, self._config, "the restart", since, look_again)

    def has_attempts(self, step: int) -> bool:
        """Return whether there is another attempt if this step fails now."""
        return self._why_not(step, self._failures[step] + 1) is None

    def note_samples(self, step: int, num_kept: int, num_regenerated: int) -> None:
        """Log how many samples of a lost group survived, and how many are generated again."""
        text = "step %d: %d samples of the lost group are kept, %d are regenerated."
        logger.warning(text, step, num_kept, num_regenerated)
        self._write(step, samples_kept=num_kept, samples_made_again=num_regenerated)

    def resuming(self, config: Config) -> Config:
        """Return the configuration of the next attempt, which resumes from any checkpoint."""
        if not saved_steps(Path(self._config.trainer.default_local_dir)):
            return config
        return replace_keys(
            config, {"trainer.resume_mode": "auto", "trainer.resume_from_path": None}
        )

    def _why_not(self, step: int, failures: int) -> str | None:
        """Return why there is no further attempt ("" if that is plain), or None if there is one."""
        if step == 0:
            return ""
        if failures >= MAX_STEP_FAILURES and self._count:
            return f"step {step} failed {MAX_STEP_FAILURES} times, so it is not tried again."
        if self._count >= self._config.trainer.max_restarts:
            used = f"all trainer.max_restarts={self._count} restarts are used up"
            return used if self._count else ""
        return None

    def _pause(self, seconds: float) -> None:
        while seconds > 0 and not self._stop.received:
            time.sleep(min(seconds, LOOK_AGAIN_S))
            seconds -= LOOK_AGAIN_S

    def _write(self, step: int, **fields: Any) -> None:
        time_of = datetime.now(UTC).isoformat(timespec="seconds")
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json_line({"time": time_of, "step": step, **fields}))


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
