"""Score with a reward function in separate processes, which a deadline can kill.

    scorer = Scorer(function, batch_deadline)
    scorer.start()                          # raises a ConfigError for a bad function
    outcomes = scorer.score(samples)
    scorer.stop()                           # ends the processes, and all that they have started

Each `RewardProcess` runs `workers.rewards.process`. The second and later ones start only if a batch
takes long. A process that ends or hangs is restarted. If its function scores one sample per call,
the remaining samples are requested again in smaller groups, until the sample is known that ends or
blocks the process.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from verl_like.errors import ConfigError
from verl_like.process.machine import usable_cores
from verl_like.process.supervisor import Supervised
from verl_like.registry import check_file
from workers.rewards.call import Sample
from workers.rewards.channel import DriverEnd, NoAnswerError
from workers.rewards.outcome import LATE, Outcome, read_answer
from workers.rewards.process import FunctionSpec

logger = logging.getLogger(__name__)

MOST_PROCESSES = 8
"""Maximum number of processes for a batch, at most one per core."""
SLOW_S = 1.0
"""An unfinished batch gets one more process each time that so many seconds have passed."""
MOST_AT_A_TIME = 64
"""Maximum samples per request, unless the process takes all samples (`takes_all`)."""
QUICK_S = 0.05
"""A process that replies in less time gets twice as many samples next time, otherwise one."""
GRACE_S = 0.5
"""Seconds between a sample's deadline and the kill, in which coroutines end by themselves."""
BLOCKED_SHARE = 1.25
"""Multiple of the deadline in which a process must report a coroutine that blocks the others."""


class Scorer:
    """The processes of one reward function, which score one batch at a time."""

    def __init__(self, function: FunctionSpec, batch_deadline: float):
        self._function, self._batch_deadline = function, batch_deadline
        self._is_given_up = False
        count = min(MOST_PROCESSES, usable_cores())
        self._processes = [RewardProcess(function, batch_deadline) for _ in range(count)]
        self._samples: Sequence[Sample] = ()
        self._outcomes: list[Outcome] = []
        self._end = 0.0
        """The batch's deadline, a time of `time.monotonic`."""
        self._groups: deque[list[int]] = deque()
        """Numbers of samples that wait; a process takes samples of the first group."""
        self._taking = Lock()

    def start(self) -> None:
        """Load the function once; raise if that fails."""
        try:
            self._processes[0].start()
        except (OSError, ProcessEndedError) as err:
            raise ConfigError(
                f"the reward function {self._function} could not be loaded: {err}. The output of "
                "its process is above."
            ) from err

    @property
    def reads(self) -> frozenset[str] | None:
        """Names of the entries of a sample that the loaded function gets; None means all."""
        return self._processes[0].reads

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample."""
        self._samples, self._outcomes = samples, [(None, {}, LATE)] * len(samples)
        self._groups = deque([list(range(len(samples)))])
        self._end = time.monotonic() + self._batch_deadline
        idle = deque(self._processes)
        running: list[Future[None]] = []
        with ThreadPoolExecutor(len(idle), thread_name_prefix="scorer") as threads:
            while (idle and self._has_work()) or not all(future.done() for future in running):
                if idle and self._has_work():
                    running.append(threads.submit(self._score_by, idle.popleft()))
                wait(running, SLOW_S)
        for future in running:
            future.result()
        return self._outcomes

    def give_up(self) -> None:
        """Let a `score` in another thread end soon, and later ones end immediately."""
        self._is_given_up = True
        self._end = time.monotonic()
        for process in self._processes:
            process.give_up()

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.stop()

    def _has_work(self) -> bool:
        """Return True if samples wait and there is time left."""
        return any(self._groups) and not self._is_given_up and time.monotonic() < self._end

    def _score_by(self, process: RewardProcess) -> None:
        """Let a process score samples of the batch until none waits.

        If the process does not start, the other processes score all samples.
        """
        try:
            process.start()
        except (ConfigError, OSError, ProcessEndedError) as err:
            logger.warning("a process of %s could not be started: %s", self._function, err)
            return
        size = 1
        while samples := self._take(None if process.takes_all else size):
            began = time.monotonic()
            try:
                for number, outcome in process.outcomes(samples, self._end):
                    self._outcomes[number] = outcome
                    del samples[number]
            except (ConfigError, OSError, ProcessEndedError) as err:
                process.stop()
                self._put_back(list(samples), process, err)
            is_quick = time.monotonic() - began < QUICK_S
            size = min(2 * size, MOST_AT_A_TIME) if is_quick else 1

    def _take(self, most: int | None) -> dict[int, Sample]:
        """Take at most `most` samples of the first group; none if none waits or the time is up."""
        with self._taking:
            if not self._has_work():
                return {}
            group = self._groups.popleft()
            if most is not None and len(group) > most:
                self._groups.appendleft(group[most:])
            return {number: self._samples[number] for number in group[:most]}

    def _put_back(self, missing: list[int], process: RewardProcess, err: Exception) -> None:
        """Store the error for the samples that caused it; let the others wait in smaller groups."""
        is_late = isinstance(err, TimeoutError)
        if isinstance(err, ProcessEndedError) and not process.is_new:
            num_culprits = 0  # an earlier request may have ended it
        elif isinstance(err, ConfigError) or process.answers_together:
            num_culprits = len(missing)
        else:  # one by one, the first missing sample is late; an earlier one may end the process
            num_culprits = int(len(missing) == 1 or (is_late and not process.takes_all))
        for number in missing[:num_culprits]:
            self._outcomes[number] = (None, {}, LATE if is_late else str(err))

        others = missing[num_culprits:]
        half = len(others) // 2 if process.takes_all else 1
        cut = len(others) if num_culprits or process.answers_together else half
        with self._taking:
            self._groups.extendleft(group for group in (others[cut:], others[:cut]) if group)


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
        self._num_sent = 0
        """Number of samples that any of its processes was sent."""
        self.reads: frozenset[str] | None = None
        """The entries of a sample that are sent because the function reads them; None: all."""

    def start(self) -> None:
        """Start the process if there is none.

        Raises a ConfigError if the function is rejected or loads too slowly, and ProcessEndedError
        or OSError if the process ends.
        """
        if self._channel is not None:
            return
        try:
            env = self._function.sandbox.env
            supervised = self._supervised = Supervised("workers.rewards.process", env)
            withheld = sorted(os.environ.keys() - supervised.visible.keys())
            try:
                supervised.pipe.send((self._function, withheld))
            finally:
                self._channel = DriverEnd(supervised.pipe)
            end = time.monotonic() + self._start_deadline
            try:
                _, supervised.folder = self._receive(end)
                problem, side_by_side, together, reads = self._receive(end)
                self.reads = None if reads is None else frozenset(map(str, reads))
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
        first, self._num_sent = self._num_sent, self._num_sent + len(requested)
        numbers = dict(enumerate(requested, first))  # no two requests have a number in common
        samples, missing = list(enumerate(requested.values(), first)), {*numbers}
        if self.reads is not None:
            samples = [
                (number, {name: value for name, value in sample.items() if name in self.reads})
                for number, sample in samples
            ]
        reply_s = float("inf")  # in which the next reply must arrive
        if not self.answers_together:
            shares = BLOCKED_SHARE if self.takes_all else 1.0
            reply_s = shares * self._function.deadline + GRACE_S
        try:
            self._channel.send(samples, min(end, time.monotonic() + reply_s))
        except TimeoutError:
            raise
        except OSError:
            pass  # the process has ended, and its supervisor's reply says how
        while missing:
            answer = self._receive(min(end, time.monotonic() + reply_s))
            try:
                number, outcome = read_answer(answer, missing)
            except ValueError as err:
                raise ProcessEndedError(f"the reward process {err}") from err
            missing.remove(number)
            yield numbers[number], outcome

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
        if self._supervised is not None:
            self._supervised.stop()
        self._supervised = None
