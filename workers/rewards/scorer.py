"""Score with a reward function in separate processes, which a deadline can kill.

Each process is a `RewardProcess` (`workers.rewards.handle`). The second and later ones start only
if a batch takes long. A process that ends or hangs is restarted. If its function scores one sample
per call, the remaining samples are requested again in smaller groups, until the sample is known
that ends or blocks the process.
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
"""Maximum number of processes for a batch, at most one per core."""
SLOW_S = 1.0
"""An unfinished batch gets one more process each time that so many seconds have passed."""
MOST_AT_A_TIME = 64
"""Maximum samples per request, unless the process takes all samples (`takes_all`)."""
QUICK_S = 0.05
"""A process that replies in less time gets twice as many samples next time, otherwise one."""


class _Batch:
    """One batch of samples: groups of their numbers that wait for a process, and outcomes."""

    def __init__(self, samples: Sequence[Sample], seconds: float):
        self.samples = samples
        self.outcomes: list[Outcome] = [(None, {}, LATE)] * len(samples)
        self.end = time.monotonic() + seconds
        self._parts = deque([list(range(len(samples)))])
        self._taking = Lock()

    def take(self, most: int | None) -> dict[int, Sample]:
        """Take at most `most` samples of the next group; none if none waits or the time is up."""
        with self._taking:
            if not self.has_work():
                return {}
            part = self._parts.popleft()
            if most is not None and len(part) > most:
                self._parts.appendleft(part[most:])
            return {number: self.samples[number] for number in part[:most]}

    def put_back(self, *parts: list[int]) -> None:
        """Return groups to the front of the queue."""
        with self._taking:
            self._parts.extendleft(part for part in reversed(parts) if part)

    def has_work(self) -> bool:
        """Return True if samples wait and there is time left."""
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
        """Load the function once; raise if that fails."""
        try:
            self._processes[0].start()
        except (OSError, ProcessEndedError) as err:
            raise ConfigError(
                f"the reward function {self._function} could not be loaded: {err}. The output of "
                "its process is above."
            ) from err

    def score(self, samples: list[Sample]) -> list[Outcome]:
        """Return one outcome per sample."""
        batch = self._batch = _Batch(samples, self._batch_deadline)
        if self._is_given_up:
            return batch.outcomes
        idle = deque(self._processes)
        running: list[Future[None]] = []
        with ThreadPoolExecutor(len(idle), thread_name_prefix="scorer") as threads:
            while (idle and batch.has_work()) or not all(future.done() for future in running):
                if idle and batch.has_work():
                    running.append(threads.submit(self._score_by, idle.popleft(), batch))
                wait(running, SLOW_S)
        for future in running:
            future.result()
        self._batch = None
        return batch.outcomes

    def give_up(self) -> None:
        """Let a `score` in another thread end soon, and later ones end immediately."""
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
        """Let a process score samples of the batch until none waits.

        If the process does not start, the other processes score all samples.
        """
        try:
            process.start()
        except (ConfigError, OSError, ProcessEndedError) as err:
            logger.warning("a process of %s could not be started: %s", self._function, err)
            return
        size = 1
        while samples := batch.take(None if process.takes_all else size):
            began = time.monotonic()
            _ask(process, samples, batch)
            is_quick = time.monotonic() - began < QUICK_S
            size = min(2 * size, MOST_AT_A_TIME) if is_quick else 1


def _ask(process: RewardProcess, samples: dict[int, Sample], batch: _Batch) -> None:
    """Store the outcomes of these samples; after a failure, put the remaining samples back."""
    answered = set()
    try:
        for number, outcome in process.outcomes(samples, batch.end):
            batch.outcomes[number] = outcome
            answered.add(number)
    except (ConfigError, OSError, ProcessEndedError) as err:
        process.stop()
        missing = [number for number in samples if number not in answered]
        is_late = isinstance(err, TimeoutError)
        if isinstance(err, ProcessEndedError) and not process.is_new:
            num_culprits = 0  # an earlier request may have ended it
        elif isinstance(err, ConfigError) or process.answers_together:
            num_culprits = len(missing)
        else:  # one by one, the first missing sample is late; an earlier one may end the process
            num_culprits = int(len(missing) == 1 or (is_late and not process.takes_all))
        for number in missing[:num_culprits]:
            batch.outcomes[number] = (None, {}, LATE if is_late else str(err))

        others = missing[num_culprits:]
        half = len(others) // 2 if process.takes_all else 1
        cut = len(others) if num_culprits or process.answers_together else half
        batch.put_back(others[:cut], others[cut:])
