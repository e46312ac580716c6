"""Scoring by a reward function in processes of its own, which a deadline can kill.

Each process runs `workers.rewards.process`. Only a batch that takes long starts more than the first
of them.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from threading import Lock

from verl_like.errors import ConfigError
from verl_like.process.child import start_child
from verl_like.process.machine import usable_cores
from workers.rewards.call import Sample
from workers.rewards.process import LATE, FunctionSpec, Outcome

logger = logging.getLogger(__name__)

GRACE_S = 0.5
"""What a sample gets beyond its deadline, which coroutines keep themselves, before the kill."""
MOST_PROCESSES = 8
"""Processes that score a batch, where the machine has as many cores."""
SLOW_S = 1.0
"""A batch that is not done gets one process more whenever this time has passed."""
MOST_AT_A_TIME = 64
"""Samples that a process is asked for at once."""


class _Batch:
    """The samples of one batch that nobody has asked for yet, and what has come of the others."""

    def __init__(self, samples: list[Sample], seconds: float):
        self.waiting = deque(enumerate(samples))
        self.outcomes: list[Outcome] = [(None, {}, LATE)] * len(samples)
        self.end = time.monotonic() + seconds
        self._taking = Lock()

    def take(self, shares: int | None) -> dict[int, Sample]:
        """The next samples by their numbers: one of so many shares of the rest; None: all."""
        with self._taking:
            left = len(self.waiting)
            count = left if shares is None else min(MOST_AT_A_TIME, -(-left // shares))
            return dict([self.waiting.popleft() for _ in range(count)])

    def goes_on(self) -> bool:
        """Whether samples wait and there is time left."""
        return bool(self.waiting) and time.monotonic() < self.end


class Scorer:
    """The processes of one reward function."""

    def __init__(self, function: FunctionSpec, batch_deadline: float):
        self._function, self._batch_deadline = function, batch_deadline
        count = min(MOST_PROCESSES, usable_cores())
        self._processes = [_Process(function, batch_deadline) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="scorer")

    def start(self) -> None:
        """Have the function loaded once; raises what is wrong with it."""
        try:
            self._processes[0].start()
        except (EOFError, OSError, TimeoutError) as err:
            self.stop()
            raise ConfigError(
                f"The reward function {self._function} is not loaded within "
                f"{self._batch_deadline:g} s; what its process said is above."
            ) from err

    def score(self, samples: list[Sample]) -> list[Outcome]:
        """An outcome for every sample."""
        batch = _Batch(samples, self._batch_deadline)
        running: list[Future[None]] = []
        for process in self._processes:
            if batch.goes_on():
                shares = None if self._processes[0].takes_all else 2 * len(self._processes)
                running.append(self._threads.submit(process.score, batch, shares))
                wait(running, SLOW_S)
        for future in running:
            future.result()
        return batch.outcomes

    def stop(self) -> None:
        """End all processes."""
        self._threads.shutdown()
        for process in self._processes:
            process.stop()


class _Process:
    """One process, from the driver's side: started when it is needed, killed when it hangs."""

    def __init__(self, function: FunctionSpec, start_deadline: float):
        self._function, self._start_deadline = function, start_deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self.takes_all = False
        """Whether it gets all that waits: calls run at the same time, or one takes a whole batch.

        Known when the function is loaded.
        """
        self._answers_together = False

    def score(self, batch: _Batch, shares: int | None) -> None:
        """Take samples of the batch until none is left.

        A process that does not start leaves them to the others.
        """
        try:
            self.start()
        except (EOFError, OSError) as err:
            self.stop()
            logger.warning(
                "a process of %s does not start: %s", self._function, err or type(err).__name__
            )
            return
        while batch.goes_on():
            self._score(batch.take(shares), batch)

    def _score(self, pending: dict[int, Sample], batch: _Batch) -> None:
        # Once the process has died: coroutines run side by side, and any of them may have ended it.
        one_by_one = False
        while pending and time.monotonic() < batch.end:
            asked = dict(list(pending.items())[: 1 if one_by_one else None])
            try:
                self._ask(asked, pending, batch)
            except TimeoutError:
                self.stop()
                del pending[next(iter(asked))]
            except (EOFError, OSError):
                code = self.stop()
                if one_by_one:
                    (number,) = asked
                    reason = f"the reward process ended with exit code {code}"
                    batch.outcomes[number] = (None, {}, reason)
                    del pending[number]
                one_by_one = True

    def _ask(self, asked: dict[int, Sample], pending: dict[int, Sample], batch: _Batch) -> None:
        """Send these samples, and take their outcomes as they come; a late one is an error."""
        pipe = self.start()
        pipe.send(list(asked.items()))
        while asked:
            patience = batch.end - time.monotonic()
            if not self._answers_together:
                patience = min(self._function.deadline + GRACE_S, patience)
            if not pipe.poll(max(0.0, patience)):
                raise TimeoutError
            number, outcome = pipe.recv()
            batch.outcomes[number] = outcome
            del pending[number], asked[number]

    def start(self) -> Connection:
        """The pipe to the process, which is started if there is none."""
        if self._pipe is None:
            self._process, self._pipe = start_child(
                "workers.rewards.process", self._function.to_json()
            )
            if not self._pipe.poll(self._start_deadline):
                raise TimeoutError(f"{self._function} is not loaded yet")
            problem, side_by_side, self._answers_together = self._pipe.recv()
            self.takes_all = side_by_side or self._answers_together
            if problem is not None:
                self.stop()
                raise ConfigError(problem)
        return self._pipe

    def stop(self) -> int | None:
        """Kill the process, if there is one; its exit code."""
        if self._process is None or self._pipe is None:
            return None
        self._pipe.close()
        self._process.kill()
        code = self._process.wait()
        self._process = self._pipe = None
        return code
