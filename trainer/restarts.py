"""Decide whether, when and with which state a run that lost a worker continues.

A lost group whose roles have no state of their own (rollouts, models that do not change) can be
replaced within the step by `trainer.recovery`; the other groups continue the step. After any other
loss, `trainer.lost_groups` restores the groups for another attempt.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from trainer.config.schema import RunConfig
from trainer.run_folder.folder import committed
from trainer.run_folder.signals import StopSignals
from verl_like.config_key import replace_keys
from verl_like.errors import VerlLikeError, WaitTimeoutError, WeightSyncError, WorkerDiedError
from verl_like.files import json_line
from verl_like.masking import mask_text


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
logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Config = TypeVar("Config", bound=RunConfig)
RESTARTS_FILE = "restarts.jsonl"


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
        if not committed(Path(self._config.trainer.default_local_dir)):
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


def describe_lost_steps(num_steps: int) -> str:
    """Describe how many finished steps a restart lost."""
    if num_steps == 0:
        return "no finished step is lost"
    return f"{num_steps} finished step{'s' * (num_steps > 1)} repeated"
