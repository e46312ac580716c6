"""Failures of rewards by their kind, so that each is said once: the place, or else the text.

Thousands of samples fail in one line of a function, each with words of its own.
"""

from __future__ import annotations

import linecache
import logging
from collections.abc import Iterable
from dataclasses import dataclass

logger = logging.getLogger(__name__)
MOST_KINDS = 10
"""Kinds that are told apart; what comes later is one more."""
OTHERS = "other failures"


@dataclass
class Failure:
    """A kind of failure: the first of its samples, and how many there are."""

    uid: str
    error: str
    count: int = 0

    def __str__(self) -> str:
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        return f"{self.uid}{more}: {with_source(self.error)}"


Failures = dict[str, Failure]
"""The failures of one reward by their kind."""


def by_kind(failed: Iterable[tuple[str, str]]) -> Failures:
    """(uid, error) of samples as kinds, in the order in which they came."""
    kinds: Failures = {}
    for uid, error in failed:
        kind = error.rpartition("\n")[2]
        if kind not in kinds and len(kinds) >= MOST_KINDS:
            kind = OTHERS
        kinds.setdefault(kind, Failure(uid, error)).count += 1
    return kinds


def with_source(error: str) -> str:
    """The error with the line of code that its last line names, where that can be read."""
    file, _, number = error.rpartition("\n    at ")[2].rpartition(", line ")
    source = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    return f"{error}: {source}" if source else error


class SaidOnce:
    """The failures of a run's rewards: the first of a kind is logged, and at the end the sums."""

    def __init__(self) -> None:
        self._sums: dict[str, Failures] = {}
        self._has_more = False
        """Whether there were failures that were not logged."""

    def note(self, name: str, num_samples: int, cost: str, failures: Failures) -> None:
        """Those of one batch, of the reward of that name; `cost` says what its samples get."""
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
                "the reward %r failed for %s, which %s; later failures like this are counted:%s",
                *(name, of_all, cost, _below(new)),
            )

    def close(self) -> None:
        """Log the sums, if what was logged before was not all."""
        for name, sums in self._sums.items():
            if self._has_more and sums:
                logger.warning("the reward %r failed in all:%s", name, _below(sums.values()))


def _below(failures: Iterable[Failure]) -> str:
    return "".join(f"\n  {failure}" for failure in failures)
