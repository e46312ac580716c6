"""Handle of a reward process, which starts when needed and can be stopped when it hangs.

    process = RewardProcess(function, start_deadline)
    process.start()                                     # raises a ConfigError for a bad function
    for number, outcome in process.outcomes({3: sample}, end): ...
    process.stop()                                      # ends all of its processes

The process runs `workers.rewards.process`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from verl_like.errors import ConfigError
from verl_like.process.child import start_child
from verl_like.process.sandbox import visible_environment
from verl_like.process.supervisor import Supervised
from verl_like.registry import check_file
from workers.rewards.call import Sample
from workers.rewards.channel import DriverEnd, NoAnswerError
from workers.rewards.outcome import Outcome, read_answer
from workers.rewards.process import FunctionSpec

GRACE_S = 0.5
"""Seconds between a sample's deadline and the kill, in which coroutines end by themselves."""
BLOCKED_SHARE = 1.25
"""Multiple of the deadline in which a process must report a coroutine that blocks the others."""
END_S = 10.0
"""Seconds that a supervisor has to kill its child."""


class ProcessEndedError(Exception):
    """Raised if a reward process has ended or sent an invalid reply; the message says how."""


class RewardProcess:
    """A process that scores samples with a function, and its supervisor."""

    def __init__(self, function: FunctionSpec, start_deadline: float):
        """Reject a missing file; do not start the process yet."""
        if function.path.endswith(".py"):  # the process has another working directory
            check_file(Path(function.path), f"{function.path_key}={function.path}")
            function = replace(function, path=str(Path(function.path).absolute()))
        self._function, self._start_deadline = function, start_deadline
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._channel: DriverEnd | None = None
        self._closing = Lock()
        self._supervised: Supervised | None = None
        self.takes_all = False
        """True if it gets all waiting samples at once; known once the function is loaded.

        The function is then async, so that calls are concurrent, or scores a batch in one call.
        """
        self.answers_together = False
        """True if one call scores a whole batch."""
        self.is_new = False
        """True if it was started for its latest request."""
        self._reads: frozenset[str] | None = None
        """The entries of a sample that are sent because the function reads them; None: all."""

    def start(self) -> None:
        """Start the process if there is none.

        Raises a ConfigError if the function is rejected or loads too slowly, and ProcessEndedError
        or OSError if the process ends.
        """
        if self._channel is not None:
            return
        visible = visible_environment(self._function.sandbox.env)
        try:
            self._supervisor, pipe = start_child("workers.rewards.process", inherited=visible)
            try:
                pipe.send((self._function, sorted(os.environ.keys() - visible.keys())))
            finally:
                self._channel = DriverEnd(pipe)
            end = time.monotonic() + self._start_deadline
            try:
                self._supervised = Supervised(*self._receive(end))
                problem, side_by_side, together, reads = self._receive(end)
                self._reads = None if reads is None else frozenset(map(str, reads))
            except TimeoutError as err:
                raise ConfigError(
                    f"the reward function {self._function} did not load within "
                    f"{self._start_deadline:g} s, the timeout of a batch. Move slow work out of "
                    "the import of its file, or raise reward.timeout_s (`timeout_s` in "
                    "reward.list, --batch-timeout-s of `verl-like serve-reward`)."
                ) from err
            except (TypeError, ValueError) as err:
                raise ProcessEndedError(
                    f"the reward process sent an unexpected reply: {err}"
                ) from err
            if problem is not None:
                raise ConfigError(str(problem))
        except BaseException:
            self.stop()
            raise
        self.answers_together = bool(together)
        self.takes_all = self.answers_together or bool(side_by_side)

    def outcomes(
        self, requested: Mapping[int, Sample], end: float
    ) -> Iterator[tuple[int, Outcome]]:
        """Yield the numbers and outcomes of these samples, as they arrive.

        Raises TimeoutError at a sample's deadline or at `end`, and ProcessEndedError if no more
        outcomes will come; the caller must then stop the process. `end` is a time of
        `time.monotonic`.
        """
        self.is_new = self._channel is None
        self.start()
        assert self._channel is not None, "it has been started"
        missing = set(requested)
        samples = [(number, self._part_of(sample)) for number, sample in requested.items()]
        try:
            self._channel.send(samples, min(end, time.monotonic() + self._reply_timeout()))
        except TimeoutError:
            raise
        except OSError:
            pass  # the process has ended, and its supervisor's reply says how
        while missing:
            answer = self._receive(min(end, time.monotonic() + self._reply_timeout()))
            try:
                number, outcome = read_answer(answer, missing)
            except ValueError as err:
                raise ProcessEndedError(f"the reward process {err}") from err
            missing.remove(number)
            yield number, outcome

    def _part_of(self, sample: Sample) -> Sample:
        """Return the sample with only the entries that the function reads."""
        if self._reads is None or sample.keys() <= self._reads:
            return sample
        return {name: value for name, value in sample.items() if name in self._reads}

    def _reply_timeout(self) -> float:
        """Return the seconds in which the next reply must arrive."""
        if self.answers_together:
            return float("inf")
        shares = BLOCKED_SHARE if self.takes_all else 1.0
        return shares * self._function.deadline + GRACE_S

    def _receive(self, deadline: float) -> Any:
        """Return the next reply; raise ProcessEndedError if there is none or it is invalid."""
        assert self._channel is not None, "it has been started"
        try:
            return self._channel.receive(deadline)
        except TimeoutError:
            raise
        except NoAnswerError as err:
            raise ProcessEndedError(f"the reward process {err}") from err
        except (OSError, EOFError) as err:
            raise ProcessEndedError("the reward process and its supervisor are gone") from err

    def give_up(self) -> None:
        """Kill the process, from another thread than the one that waits for its outcomes."""
        with self._closing, suppress(OSError):
            if self._channel is not None:
                self._channel.shut()  # its supervisor then kills it

    def stop(self) -> None:
        """End the process and all processes that it has started."""
        with self._closing:
            if self._channel is not None:
                self._channel.close()  # its supervisor then kills it
            self._channel = None
        if self._supervisor is not None:
            with suppress(ProcessLookupError):  # untrusted code may have paused the supervisor
                os.kill(self._supervisor.pid, signal.SIGCONT)
            try:
                self._supervisor.wait(END_S)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
        if self._supervised is not None:
            if self._supervisor is not None and self._supervisor.returncode != 0:
                self._supervised.end()  # a killed supervisor leaves its child running
            self._supervised.close()
        self._supervisor = self._supervised = None
