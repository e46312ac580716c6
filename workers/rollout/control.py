"""Abort, pause and resume of a generation from another thread.

Rollout engines ask `GenerationControl` between steps.

    control.pause()                 # the generation stops before its next step
    control.resume()
    control.abort()                 # `generate` returns; unfinished samples say "abort"

    with control.held():            # as pause and resume, for whoever brings new weights
        engine.load_weights(tensors)
        engine.commit(version)      # tokens from here on are the new version's
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from verl_like.errors import RolloutError

AWAKE_EVERY_S = 1.0
STEP_TIMEOUT_S = 60.0
"""How long a step may take before whoever asked for a pause is told so."""


class GenerationControl:
    """One per engine. All methods but `checkpoint` and `running` may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = False
        self._num_holds = 0
        self._aborted = False
        self._waiting = False
        self.num_running = 0

    @contextmanager
    def held(self, timeout_s: float = STEP_TIMEOUT_S) -> Iterator[None]:
        """Around a change of the weights: the generation in flight stands still, or the next one.

        Whether somebody pauses or aborts meanwhile makes no difference to it. Where the step in
        flight takes longer than `timeout_s`, the block is entered all the same: whoever loads
        weights then is refused by `RolloutEngine.load_weights`.
        """
        with self._changed:
            self._num_holds += 1
            self._changed.wait_for(self._stands_still, timeout_s)
        try:
            yield
        finally:
            with self._changed:
                self._num_holds -= 1
                self._changed.notify_all()

    def pause(self, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Stop the generation in flight before its next step; returns when it waits.

        Where none is running, it returns at once.
        """
        with self._changed:
            self._paused = True
            if not self._changed.wait_for(self._stands_still, timeout_s):
                self._paused = False
                raise RolloutError(
                    "rollout: the generation in flight came to no step's end within "
                    f"{timeout_s:.0f} s; it runs on."
                )

    def resume(self) -> None:
        """Let it go on."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def abort(self) -> None:
        """Make the `generate` in flight return its partial results; also ends a pause.

        No effect on later calls.
        """
        with self._changed:
            self._aborted = self.num_running > 0
            self._paused = False
            self._changed.notify_all()

    @property
    def in_flight(self) -> bool:
        """Whether a generation is running or paused."""
        return self.num_running > 0

    @property
    def is_paused(self) -> bool:
        """Whether the generation in flight waits between two steps."""
        return self._waiting

    def checkpoint(self) -> bool:
        """The engine's side, between two steps: waits while paused; True asks it to stop."""
        if not self._must_wait() and not self._aborted:
            return False
        with self._changed:
            self._wait()
            return self._aborted

    @contextmanager
    def running(self, num_requests: int) -> Iterator[None]:
        """The engine's side: around one generation; there is one at a time.

        Where one is to wait, it does so before its first step.
        """
        with self._changed:
            if self.num_running:
                raise RolloutError(
                    f"rollout: this engine is generating {self.num_running} samples already."
                )
            self.num_running, self._aborted = num_requests, False
            self._wait()
        try:
            yield
        finally:
            with self._changed:
                self.num_running, self._aborted = 0, False
                self._changed.notify_all()

    def _must_wait(self) -> bool:
        return self._paused or self._num_holds > 0

    def _wait(self) -> None:
        """Stand still for as long as is asked for; the caller has the lock."""
        if self._must_wait():
            self._waiting = True
            self._changed.notify_all()
            while self._must_wait():
                # it wakes up now and then: this wait is meant, and no deadlock
                self._changed.wait(AWAKE_EVERY_S)
            self._waiting = False

    def _stands_still(self) -> bool:
        return self._waiting or not self.num_running
