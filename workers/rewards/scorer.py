"""Scoring by a reward function in processes of its own, which a deadline can kill.

Each process is a `RewardProcess` (`workers.rewards.handle`). Only a batch that takes long starts
more than the first of them. A process that ends or hangs is started again, and the samples that it
has not answered are asked for in smaller parts, until it is known which of them it was: one that
ended a process that was started for it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
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
"""Samples that a process is asked for at once, unless its function takes all of them."""
QUICK_S = 0.05
"""A process that answers in less is asked for twice as many samples the next time."""


class _Batch:
    """The samples of one batch by their numbers: parts that wait for a process, and outcomes."""

    def __init__(self, samples: Sequence[Sample], seconds: float):
        self.samples = samples
        self.outcomes: list[Outcome] = [(None, {}, LATE)] * len(samples)
        self.end = time.monotonic() + seconds
        self._parts = deque([list(range(len(samples)))])
        self._taking = Lock()

    def take(self, most: int | None) -> dict[int, Sample]:
        """The next part, or so many of its samples; none when nothing waits, or time is up."""
        with self._taking:
            if not self.goes_on():
                return {}
            part = self._parts.popleft()
            if most is not None and len(part) > most:
                self._parts.appendleft(part[most:])
            return {number: self.samples[number] for number in part[:most]}

    def put_back(self, *parts: list[int]) -> None:
        """Put parts that were taken back in front of those that wait."""
        with self._taking:
            self._parts.extendleft(part for part in reversed(parts) if part)

    def goes_on(self) -> bool:
        """Whether samples wait and there is time left."""
        return any(self._parts) and time.monotonic() < self.end


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
        idle = deque(self._processes)
        running: list[Future[None]] = []
        with ThreadPoolExecutor(len(idle), thread_name_prefix="scorer") as threads:
            while (idle and batch.goes_on()) or not all(future.done() for future in running):
                if idle and batch.goes_on():
                    running.append(threads.submit(self._score_by, idle.popleft(), batch))
                wait(running, SLOW_S)
        for future in running:
            future.result()
        self._batch = None
        return batch.outcomes

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

    def _score_by(self, process: RewardProcess, batch: _Batch) -> None:
        """Have a process take samples of the batch until none waits.

        A process that does not start leaves its samples to the others.
        """
        try:
            process.start()
        except (ConfigError, OSError, ProcessEndedError) as err:
            logger.warning(
                "a process of %s does not start: %s", self._function, err or type(err).__name__
            )
            return
        size = 1
        while asked := batch.take(None if process.takes_all else size):
            began = time.monotonic()
            _ask(process, asked, batch)
            is_quick = time.monotonic() - began < QUICK_S
            size = min(2 * size, MOST_AT_A_TIME) if is_quick else 1


def _ask(process: RewardProcess, asked: dict[int, Sample], batch: _Batch) -> None:
    """Fill in the outcomes of these samples; those that a failure left unanswered wait again."""
    answered = set()
    try:
        for number, outcome in process.outcomes(asked, batch.end):
            batch.outcomes[number] = outcome
            answered.add(number)
    except (ConfigError, OSError, ProcessEndedError) as err:
        process.stop()
        missing = [number for number in asked if number not in answered]
        is_late = isinstance(err, TimeoutError)
        if isinstance(err, ProcessEndedError) and not process.is_new:
            num_culprits = 0  # something else may have killed it, or what it was asked before
        elif isinstance(err, ConfigError) or process.answers_together:
            num_culprits = len(missing)
        else:  # one by one the first of them is late; what ended a process may be an earlier one
            num_culprits = int(len(missing) == 1 or (is_late and not process.takes_all))
        for number in missing[:num_culprits]:
            batch.outcomes[number] = (None, {}, LATE if is_late else str(err))

        others = missing[num_culprits:]
        half = len(others) // 2 if process.takes_all else 1
        cut = len(others) if num_culprits or process.answers_together else half
        batch.put_back(others[:cut], others[cut:])
