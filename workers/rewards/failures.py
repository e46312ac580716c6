"""Group failures of rewards by kind, so that each kind is logged once.

The kind is the line of your code in which the error occurred, or the error's text if there is none.
Thousands of samples may fail at one line, each with a different text.
"""

from __future__ import annotations

import linecache
import logging
import os
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)
MOST_KINDS = 10
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
class Failure:
    """A kind of failure: the uid and error of its first sample, and the number of its samples."""

    uid: str
    error: str
    count: int = 0

    def __str__(self) -> str:
        others = f" and {self.count - 1} more" if self.count > 1 else ""
        return f"{self.uid}{others}: {with_source(self.error)}"


Failures = dict[str, Failure]
"""The failures of one reward by kind."""


def group_by_kind(failed: Iterable[tuple[str, str]]) -> Failures:
    """Group the pairs (uid, error) of failed samples by kind, in order of appearance."""
    kinds: Failures = {}
    for uid, error in failed:
        kind = error.rpartition("\n")[2]
        if kind not in kinds and len(kinds) >= MOST_KINDS:
            kind = OTHERS
        kinds.setdefault(kind, Failure(uid, error)).count += 1
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
            if kind not in sums and len(sums) >= MOST_KINDS:
                kind = OTHERS
            if kind in sums:
                self._has_more = True
                sums[kind].count += failure.count
            else:
                new.append(failure)
                sums[kind] = Failure(failure.uid, failure.error, failure.count)
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


def _below(failures: Iterable[Failure]) -> str:
    return "".join(f"\n  {failure}" for failure in failures)
