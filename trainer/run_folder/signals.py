"""SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask a run to stop after the current step.

    with StopSignals() as stop:  # around a run
        with stop.deferred():  # inside, the first signal is only noted
            while not stop.received: ...
            stop.end("after step 7")  # raises `RunInterrupted` if there was a signal

A second signal, or a signal outside `deferred`, raises `RunInterrupted` at once. The next signal
has its usual effect. A signal that repeats within a second is ignored: if a process group is
signaled, the run may get the signal again from the wrapper script that started it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Schedulers, Ctrl-C and a closing terminal send these signals, and so does Slurm, on request,
before the end of a job."""
REPEATED_SIGNAL_S = 1.0
"""Seconds within which a repeated signal does not count."""
EXIT_OF_SIGTERM, EXIT_OF_CTRL_C = 143, 130
"""Exit codes that shells expect after a signal: 128 plus the signal's number."""
STOP_EXITS = (EXIT_OF_SIGTERM, EXIT_OF_CTRL_C)


class RunInterrupted(KeyboardInterrupt):
    """Raised if a signal, such as Ctrl-C, stopped a run; the message says at which point.

    Like `KeyboardInterrupt`, it passes `except Exception`. `exit_code` is the code for the shell.

    Example:

        try:
            run(config)
        except RunInterrupted as stop:
            sys.exit(stop.exit_code)
    """

    def __init__(self, number: int, where: str) -> None:
        super().__init__(f"Stopped by {signal.Signals(number).name} {where}")
        self.exit_code = EXIT_OF_CTRL_C if number == signal.SIGINT else EXIT_OF_SIGTERM


class StopSignals:
    """The signals of one run. Outside the main thread, which gets all signals, it does nothing."""

    def __init__(self) -> None:
        self.received = 0
        """Number of the noted signal, or 0."""
        self._holds = self._has_raised = False
        self._before: dict[signal.Signals, Any] = {}
        self._last, self._last_at = 0, 0.0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            caught = [number for number in SIGNALS if number != signal.SIGHUP or not under_nohup]
            self._before = {number: signal.signal(number, self._on_signal) for number in caught}
        return self

    def __exit__(self, *_: object) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block, note the first signal instead of raising `RunInterrupted`."""
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before

    def end(self, where: str) -> None:
        """Raise `RunInterrupted` if a signal was noted; `where` is for its message."""
        if self.received:
            raise RunInterrupted(self.received, where)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Handle a signal: the first ends the run after the step, the second at once."""
        now = time.monotonic()
        if number == self._last and now - self._last_at < REPEATED_SIGNAL_S:
            return
        self._last, self._last_at = number, now
        if self._has_raised:
            self.__exit__()
            signal.raise_signal(number)
            return
        if self._holds and not self.received:
            self.received = number
            text = (
                f"\n{signal.Signals(number).name}: the run stops after this step, and saves it if "
                "checkpoints are enabled; a second signal stops it at once\n"
            )
            # without Python's streams, which the signal may have interrupted
            with suppress(OSError):  # a terminal that was closed
                os.write(2, text.encode())
            return
        self._has_raised = True
        raise RunInterrupted(number, "at once")
