"""Check the result of a reward function, a server or a reward process for one sample.

Failures are grouped by kind, so that each kind is logged once. The kind is the line of your code in
which the error occurred, or the error's text if there is none: thousands of samples may fail at one
line, each with a different text. This module does not import torch, because it runs in reward
processes, which start often.
"""

from __future__ import annotations

import json
import linecache
import logging
import math
import os
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, SupportsFloat

logger = logging.getLogger(__name__)
Sample = dict[str, Any]
"""The values of a sample that a reward function can read: `SAMPLE_FIELDS` and other columns."""
Steps = list[tuple[int, float]]
"""The steps of a response: the token at which each ends, and its score."""
ScoreOutcome = tuple[float | None, dict[str, Any], str | None]
"""A score, or None after a failure; other numbers, `pred` and steps; an error, or None.

With a score, the text is not an error: it names entries that are ignored.
"""
STEPS = "step_scores"
"""Key of a result for the scores of the response's steps; lists under other keys are ignored."""
VOTE = "pred"
"""Key of a result for the sample's answer, a text for the majority vote over a prompt's samples."""
FULL_REWARD = 1.0
"""The least score of a success."""


def is_success(score: float) -> bool:
    """Return True for the full reward, even if a sum of rewards falls short by rounding."""
    return score > FULL_REWARD - 1e-6


LATE = "passed its deadline"
GIVE_REWARD = (
    "Set reward=FILE.py:FUNCTION, or in Python reward=FUNCTION, to score with your own function. "
    "If only a reward model scores, set reward.function.weight=0"
)
NO_REWARD = (
    ". Return a number, a dict with a number as 'score', or (for a function with batch parameters "
    "such as solution_strs) a list of these"
)
"""End of the error for a result without a number."""
IGNORED = " cannot be written as JSON and is ignored. Return a number, for a tensor its .item()"
"""End of the note about entries that are ignored."""
LARGEST_SCORE = 3.4028234e38
"""Largest score that is finite in float32, in which a batch stores scores."""


def read_outcome(result: Any) -> ScoreOutcome:
    """Return the outcome for a function's result: a finite number, or a dict with one as "score".

    With step scores, "score" is optional. Raise a ValueError for other results.
    """
    extras = dict(result) if isinstance(result, dict) else {"score": result}
    steps = read_steps(extras.pop(STEPS, None))
    score = extras.pop("score", 0.0 if steps else None)
    try:
        number = float(score) if isinstance(score, SupportsFloat) else None
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors of several numbers
        number = None
    if number is None:
        raise ValueError(f"the reward function returned {result!r:.200}{NO_REWARD}")
    if not is_finite(number):
        raise ValueError(
            f"the reward function returned {result!r:.200}. Return a number that is finite in "
            "float32, or a dict with one as 'score'"
        )

    checked: dict[str, Any] = {}
    ignored = []
    for name, value in extras.items():
        if isinstance(value, Real):
            checked[str(name)] = float(value)
        elif name != VOTE and not is_json(value):
            ignored.append(f"{name!r} ({type(value).__name__})")
    if VOTE in extras:
        checked[VOTE] = str(extras[VOTE])
    if steps:
        checked[STEPS] = steps
    note = f"{', '.join(ignored)}{IGNORED}" if ignored else None
    return number, checked, note


def is_json(value: Any) -> bool:
    """Return True if JSON can write the value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def read_steps(steps: Any) -> Steps:
    """Check step scores: pairs [token, score] of a token index from 0 and a finite score."""
    pairs = [(int(token), float(score)) for token, score in steps or []]
    for token, score in pairs:
        if token < 0 or not is_finite(score):
            raise ValueError(
                f"{STEPS} has [{token}, {score}]. Each entry must be [token, score]: a token index "
                "of 0 or more, and a score that is finite in float32"
            )
    return pairs


def is_finite(score: float) -> bool:
    """Return True if the number is finite in float32."""
    return math.isfinite(score) and abs(score) <= LARGEST_SCORE


def read_answer(answer: Any) -> ScoreOutcome:
    """Return the outcome in a process's answer; ValueError if it is invalid."""
    try:
        score, extras, error = answer
        if score is None:
            return None, {}, str(error)
        note = None if error is None else str(error)
        if not extras and type(score) is float and is_finite(score):  # fast path
            return score, {}, note
        return *read_outcome({**extras, "score": score})[:2], note
    except (TypeError, ValueError) as err:
        raise ValueError(f"returned an invalid reply ({err})") from err


MAX_KINDS = 10
"""Maximum number of separate kinds; later ones are combined as `OTHERS`."""
OTHERS = "other failures"
PLACE = "\n    at {}, line {}"
"""End of an error text if the line of your code is known."""
NOT_THE_USERS = (
    "<frozen",
    "<string>",  # methods that dataclasses generate
    *(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")),
    *(f"{Path(__file__).parents[2] / package}{os.sep}" for package in ("verl_like", "workers")),
)
"""Prefixes of code files that belong to Python, installed packages, or this project."""


@dataclass
class ScoringFailure:
    """A kind of failure: the uid and error of its first sample, and the number of its samples."""

    uid: str
    error: str
    count: int = 0

    def __str__(self) -> str:
        others = f" and {self.count - 1} more" if self.count > 1 else ""
        return f"{self.uid}{others}: {with_source(self.error)}"


Failures = dict[str, ScoringFailure]
"""The failures of one reward by kind."""


def group_by_kind(failed: Iterable[tuple[str, str]]) -> Failures:
    """Group the pairs (uid, error) of failed samples by kind, in order of appearance."""
    kinds: Failures = {}
    for uid, error in failed:
        kind = error.rpartition("\n")[2]
        if kind not in kinds and len(kinds) >= MAX_KINDS:
            kind = OTHERS
        kinds.setdefault(kind, ScoringFailure(uid, error)).count += 1
    return kinds


def place_of(err: BaseException) -> str:
    """Return the last line of the user's code that the error passed through, or ""."""
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(err.__traceback__)
        if not frame.f_code.co_filename.startswith(NOT_THE_USERS)
    ]
    return PLACE.format(*places[-1]) if places else ""


def with_source(error: str) -> str:
    """Append the source code of the line that the error's last line names, if it can be read."""
    file, _, number = error.rpartition("\n    at ")[2].rpartition(", line ")
    source = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    return f"{error}: {source}" if source else error


class FailureLog:
    """Logs the first failure of each kind; at the end, the totals if some were not logged."""

    def __init__(self) -> None:
        self._sums: dict[str, Failures] = {}
        self._has_more = False
        """True if some failures were not logged."""

    def note(self, name: str, num_samples: int, cost: str, failures: Failures) -> None:
        """Add a reward's failures in one batch; `cost` says what happens to the failed samples."""
        sums = self._sums.setdefault(name, {})
        new = []
        for kind, failure in failures.items():
            if kind not in sums and len(sums) >= MAX_KINDS:
                kind = OTHERS
            if kind in sums:
                self._has_more = True
                sums[kind].count += failure.count
            else:
                new.append(failure)
                sums[kind] = ScoringFailure(failure.uid, failure.error, failure.count)
        if new:
            count = sum(failure.count for failure in failures.values())
            of_all = f"{count} of {num_samples} samples"
            logger.warning(
                "the reward %r failed for %s, which %s (only the first failure of each kind is "
                "logged, later ones are counted):%s",
                *(name, of_all, cost, _below(new)),
            )

    def close(self) -> None:
        """Log the totals, if some failures were not logged."""
        for name, sums in self._sums.items():
            if self._has_more and sums:
                logger.warning("total failures of the reward %r:%s", name, _below(sums.values()))


def _below(failures: Iterable[ScoringFailure]) -> str:
    return "".join(f"\n  {failure}" for failure in failures)
