"""Scoring by a reward function in processes of its own, which a deadline can kill.

Each process is a `RewardProcess` (`workers.rewards.handle`). Only a batch that takes long starts
more than the first of them. A process that ends or hangs is started again, and the samples that it
has not answered are asked for in smaller parts, until it is known which of them it was.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock

from verl_like.errors import ConfigError
from verl_like.process.machine import usable_cores
from workers.rewards.call import Sample
from workers.rewards.handle import ProcessEndedError, RewardProcess
from workers.rewards.outcome import LATE, Outcome
from workers.rewards.process import FunctionSpec

logger = logging.getLogger(__name__)

MOST_PROCESSES = 8
"""Processes that score a batch, where the machine has as many cores."""
SLOW_S = 1.0
"""A batch that is not done gets one process more whenever this time has passed."""
MOST_AT_A_TIME = 64
"""Samples that a process is asked for at once, beside others."""


class _Batch:
    """The samples of one batch that nobody has asked for yet, and what has come of the others."""

    def __init__(self, samples: list[Sample], seconds: float):
        self.waiting = deque(enumerate(samples))
        self.outcomes: list[Outcome] = [(None, {}, LATE)] * len(samples)
        now = time.monotonic()
        self.alone_until, self.end = now + SLOW_S, now + seconds
        self._taking = Lock()

    def take(self, shares: int | None) -> dict[int, Sample]:
        """The next samples by their numbers: one of so many shares of the rest; None: all."""
        with self._taking:
            left = len(self.waiting)
            count = left if shares is None else min(MOST_AT_A_TIME, -(-left // shares))
            return dict([self.waiting.popleft() for _ in range(count)])

    def give_back(self, number: int, sample: Sample) -> None:
        """It waits again, ahead of the others."""
        with self._taking:
            self.waiting.appendleft((number, sample))

    def is_for_one(self) -> bool:
        """Whether one process has all of it to itself."""
        return time.monotonic() < self.alone_until

    def goes_on(self) -> bool:
        """Whether samples wait and there is time left."""
        return bool(self.waiting) and time.monotonic() < self.end


class Scorer:
    """The processes of one reward function."""

    def __init__(self, function: FunctionSpec, batch_deadline: float):
        self._function, self._batch_deadline = function, batch_deadline
        self._batch: _Batch | None = None
        self._is_given_up = False
        count = min(MOST_PROCESSES, usable_cores())
        self._processes = [RewardProcess(function, batch_deadline) for _ in range(count)]

    def start(self) -> None:
        """Have the function loaded once; raises what is wrong with it."""
        try:
            self._processes[0].start()
        except (OSError, ProcessEndedError) as err:
            raise ConfigError(
                f"The reward function {self._function} is not loaded: {err}. What its process said "
                "is above."
            ) from err

    def score(self, samples: list[Sample]) -> list[Outcome]:
        """An outcome for every sample."""
        batch = self._batch = _Batch(samples, self._batch_deadline)
        if self._is_given_up:
            return batch.outcomes
        first = self._work(self._processes[0], batch)
        is_slow = any(not batch.is_for_one() for _ in first)  # which leaves it where it was
        if is_slow or batch.goes_on():
            self._score_side_by_side(first, batch)
        self._batch = None
        return batch.outcomes

    def _score_side_by_side(self, first: Iterator[None], batch: _Batch) -> None:
        """The first process goes on, in a thread as the others are, which start one by one."""
        idle = deque(self._processes[1:])
        with ThreadPoolExecutor(len(self._processes), thread_name_prefix="scorer") as threads:
            running: list[Future[None]] = [threads.submit(_finish, first)]
            while idle and (batch.goes_on() or not all(future.done() for future in running)):
                if batch.goes_on():
                    work = self._work(idle.popleft(), batch)
                    running.append(threads.submit(_finish, work))
                wait(running, SLOW_S)
        for future in running:
            future.result()

    def give_up(self) -> None:
        """Whoever scores a batch in another thread is soon done with it, and with any later one."""
        self._is_given_up = True
        batch = self._batch
        if batch is not None:
            batch.end = time.monotonic()
            for process in self._processes:
                process.give_up()

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.stop()

    def _work(self, process: RewardProcess, batch: _Batch) -> Iterator[None]:
        """Have a process take samples of the batch until none is left; stops after some outcomes.

        While it is alone it takes all, and leaves to the others what it has not begun when they
        come. A process that does not start leaves its samples to the others.
        """
        try:
            process.start()
        except (ConfigError, OSError, ProcessEndedError) as err:
            logger.warning(
                "a process of %s does not start: %s", self._function, err or type(err).__name__
            )
            return
        while batch.goes_on():
            takes_all = process.takes_all or batch.is_for_one()
            shares = None if takes_all else 2 * len(self._processes)
            yield from _score(process, batch.take(shares), batch)


def _finish(work: Iterator[None]) -> None:
    deque(work, maxlen=0)


def _score(process: RewardProcess, pending: dict[int, Sample], batch: _Batch) -> Iterator[None]:
    """Fill in the outcomes of these samples, whatever becomes of the process."""
    most = len(pending)
    while pending and time.monotonic() < batch.end:
        asked = dict(list(pending.items())[:most])
        try:
            until = batch.alone_until if batch.is_for_one() else math.inf
            for found in process.outcomes(asked, batch.end, until):
                for number, outcome in found.items():
                    if outcome is None:
                        batch.give_back(number, asked[number])
                    else:
                        batch.outcomes[number] = outcome
                    del pending[number], asked[number]
                yield
            most *= 2
        except (ConfigError, OSError, ProcessEndedError) as err:
            process.stop()
            reason = LATE if isinstance(err, TimeoutError) else str(err)
            culprits = list(asked)
            if not isinstance(err, ConfigError):  # the function is not even loaded
                culprits = _culprits(process, culprits, isinstance(err, TimeoutError))
            for number in culprits:
                batch.outcomes[number] = (None, {}, reason)
                del pending[number]

            # the others wait for a process without them: some of these samples first
            if process.takes_all:
                most = len(pending) if culprits else max(1, len(asked) // 2)
                continue
            most = 0 if culprits else 1
            for number in reversed(list(pending)[most:]):
                batch.give_back(number, pending.pop(number))


def _culprits(process: RewardProcess, asked: list[int], is_late: bool) -> list[int]:
    """Which of the unanswered samples ended the process or were late; none if it is not known."""
    if process.answers_together:
        return asked
    if len(asked) == 1 or (is_late and not process.takes_all):
        return asked[:1]
    return []
