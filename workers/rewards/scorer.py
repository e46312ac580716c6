"""Score with a reward function in separate processes, which a deadline can end.

    scorer = Scorer(function, batch_deadline)
    scorer.start()                          # raises a ConfigError for a bad function
    outcomes = scorer.score(samples)
    scorer.stop()                           # ends the processes, and all that they have started

The processes run `workers.rewards.process`. The second and later ones start only if a batch takes
long. A process that ends or hangs is replaced, and its group of samples is halved until the sample
is left that ends or blocks a process.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError
from verl_like.process.machine import usable_cores
from verl_like.process.pool import LOADED, Process, ProcessFailure, ProcessPool, UserCode
from verl_like.process.sandbox import Sandbox
from verl_like.registry import check_file
from workers.rewards.outcome import LATE, Sample, ScoreOutcome, read_answer

logger = logging.getLogger(__name__)

BATCH_SHARES = 12
"""Timeout and CPU time of a batch, as a multiple of a sample's.

One call of an `async` batch function has the timeout of a sample.
"""
PROGRAM_RULES = {
    ("verl_like.rules", "run_tests"),
    ("workers.rewards.code", "run_tests"),
    ("workers.rewards.functions", "code"),
    ("workers.rewards.functions", "default_compute_score"),
}
"""Module and name of the built-in functions that run a model's programs."""
MAX_PROCESSES = 8
"""Maximum number of processes for a batch, at most one per core."""
ADD_PROCESS_EVERY_S = 1.0
"""An unfinished batch gets one more process each time that so many seconds have passed."""
LOOK_S = 0.2
"""Maximum seconds until the end of `give_up` is noticed."""
MAX_AT_A_TIME = 64
"""Maximum samples per request, unless the function takes all samples at once."""
QUICK_S = 0.05
"""A process that replies in less time gets twice as many samples next time, otherwise one."""
GRACE_S = 0.5
"""Seconds between a sample's deadline and the kill, in which coroutines end by themselves."""
BLOCKED_SHARE = 1.25
"""Multiple of the deadline in which a process must report a coroutine that blocks the others."""


@dataclass(frozen=True)
class FunctionSpec:
    """A function, its arguments, and its limits."""

    path: str = "workers.rewards.functions"
    name: str = "default_compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    deadline: float = 10.0
    """Timeout of a sample, in seconds."""
    columns: Sequence[str] = ()
    """The data's other columns, which the function may read."""
    has_truth: bool = True
    """True if any row has a ground truth."""
    sandbox: Sandbox = field(default_factory=Sandbox)
    path_key: str = "reward.function.path"
    """The configuration key that set `path`, for error messages."""
    name_key: str = "reward.function.name"
    """The configuration key that set `name`."""

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"


def trust_kwargs(path: str, name: str, trust_programs: bool) -> dict[str, bool]:
    """Return the argument that tells a function if it may trust a model's programs.

    Built-in functions that run programs always get it, so that no column of the data can set it.
    """
    return {"trust_programs": trust_programs} if (path, name) in PROGRAM_RULES else {}


class Scorer:
    """The processes of one reward function, which score one batch at a time."""

    def __init__(self, function: FunctionSpec, batch_deadline: float):
        """Reject a missing file; do not start a process yet."""
        if function.path.endswith(".py"):  # the processes have other working directories
            check_file(Path(function.path), f"{function.path_key}={function.path}")
            function = replace(function, path=str(Path(function.path).absolute()))
        self._function, self._batch_deadline = function, batch_deadline
        self._code = UserCode(
            "workers.rewards.process",
            function,
            f"the reward function {function}",
            self._read_facts,
            batch_deadline,
            "This is the timeout of a batch. Move slow work out of the import of its file, or "
            "raise reward.timeout_s (`timeout_s` in reward.list, --batch-timeout-s of `verl-like "
            "serve-reward`).",
        )
        self._most = min(MAX_PROCESSES, usable_cores())
        self._is_given_up = False
        self._pool = ProcessPool()
        self._sizes: dict[Process, int] = {}
        """The loaded processes, and how many samples each gets next."""
        self._begun: dict[Process, float] = {}
        """Those that score samples, and when these were sent."""
        self._samples: Sequence[Sample] = ()
        self._outcomes: list[ScoreOutcome] = []
        self._groups: deque[list[int]] = deque()
        """Numbers of samples that wait; a process takes samples of the first group."""
        self.reads: frozenset[str] | None = None
        """The entries of a sample that the loaded function gets; None means all."""

    def _read_facts(self, facts: Any) -> None:
        """Note how the loaded function is called."""
        is_async, takes_batches, reads = facts
        self.reads = None if reads is None else frozenset(map(str, reads))
        self._is_sequential = not (is_async or takes_batches)
        self._smallest = inf if takes_batches else 1
        """A group of at most so many samples cannot be halved."""
        if takes_batches:
            self._reply_s = inf
        else:
            share = 1.0 if self._is_sequential else BLOCKED_SHARE
            self._reply_s = share * self._function.deadline + GRACE_S

    def start(self) -> None:
        """Load the function once; raise a ConfigError if that fails."""
        if not self._pool.processes:
            process = self._pool.start(self._code)
            self._pool.wait_until_loaded(process)
            self._sizes[process] = 1

    def score(self, samples: Sequence[Sample]) -> list[ScoreOutcome]:
        """Return one outcome per sample."""
        self._samples, self._outcomes = samples, [(None, {}, LATE)] * len(samples)
        self._groups = deque([[*range(len(samples))]] if samples else ())
        self._sizes = dict.fromkeys(self._sizes, 1)
        problems: list[str] = []
        began = time.monotonic()
        end = began + self._batch_deadline
        while (self._groups or self._begun) and not self._is_given_up and time.monotonic() < end:
            most = min(self._most, 1 + int((time.monotonic() - began) / ADD_PROCESS_EVERY_S))
            self._send_samples(most, end)
            if self._groups and len(self._pool.processes) + len(problems) < most:
                try:
                    self._pool.start(self._code)
                except ConfigError as err:
                    problems.append(str(err))
            elif not self._pool.processes:
                time.sleep(LOOK_S)
            for process, key, answer in self._pool.answers(LOOK_S):
                if key == LOADED:
                    self._sizes[process] = 1
                elif not isinstance(answer, ProcessFailure):
                    self._note_answer(process, key, answer)
                elif self._sizes.pop(process, None) is None:
                    problems.append(answer.words)
                elif self._begun.pop(process, None) is not None:
                    self._put_back(process, answer)
            if not self._pool.processes and len(problems) == self._most:
                for number in chain(*self._groups):
                    self._outcomes[number] = (None, {}, problems[-1])
                break
        for process in self._begun:
            self._pool.end(process)
            del self._sizes[process]
        self._begun.clear()
        for problem in problems:
            logger.warning("a process of %s could not be started: %s", self._function, problem)
        return self._outcomes

    def give_up(self) -> None:
        """Let a `score` in another thread end soon, and later ones end immediately."""
        self._is_given_up = True

    def stop(self) -> None:
        """End all processes."""
        for process in [*self._pool.processes]:
            self._pool.end(process)
        self._sizes.clear()

    def _send_samples(self, most: int, end: float) -> None:
        """Send waiting samples to idle processes, of which at most `most` work at a time."""
        idle = [process for process in self._sizes if process not in self._begun]
        for process in idle[: most - len(self._begun)]:
            if not self._groups:
                return
            group = self._groups.popleft()
            size = self._sizes[process]
            if self._is_sequential and len(group) > size:
                self._groups.appendleft(group[size:])
                group = group[:size]
            samples = {number: self._samples[number] for number in group}
            if self.reads is not None:
                samples = {
                    number: {name: value for name, value in sample.items() if name in self.reads}
                    for number, sample in samples.items()
                }
            self._begun[process] = time.monotonic()
            self._pool.send(process, samples, self._reply_s, end)

    def _note_answer(self, process: Process, number: int, answer: Any) -> None:
        try:
            self._outcomes[number] = read_answer(answer)
        except ValueError as err:
            self._outcomes[number] = (None, {}, f"the reward process {err}")
        if not process.waiting and process in self._begun:
            is_quick = time.monotonic() - self._begun.pop(process) < QUICK_S
            doubled = min(2 * self._sizes[process], MAX_AT_A_TIME)
            self._sizes[process] = doubled if is_quick else 1

    def _put_back(self, process: Process, failure: ProcessFailure) -> None:
        """Store the failure for the sample that caused it; let others wait in smaller groups."""
        numbers = [*process.waiting.values()]
        suspects = numbers[:1] if failure.is_late and self._is_sequential else numbers
        others = numbers[len(suspects) :]
        half = len(suspects) // 2
        if len(suspects) <= self._smallest:
            half = 0
            # otherwise, an earlier request may have ended the process
            if failure.is_late or process.num_requests == 1:
                error = LATE if failure.is_late else f"the reward process {failure.words}"
                for number in suspects:
                    self._outcomes[number] = (None, {}, error)
                suspects = []
        parts = (others, suspects[half:], suspects[:half])
        self._groups.extendleft(part for part in parts if part)
