"""How long the calls of a group took, and from when on one of them is late.

`WorkerFuture` notes every call that has ended well; `verl_like.calls.answers` asks for the limit.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from verl_like.calls.waiting import Deadlines

LATE_AT = 10.0
"""A call is late at so many times the median of its own."""
KNOWN_AFTER = 3
"""Calls of a method before its median counts: the first ones compile and fill caches."""
KEPT = 25
"""Calls of a method that the median is of."""


@dataclass(frozen=True)
class _Took:
    """A call that has ended: from its launch to the last rank's answer, and the rows it was for."""

    seconds: float
    rows: int


class CallTimes:
    """The last calls of every method of a group; several threads may add and ask."""

    def __init__(self) -> None:
        """None yet."""
        self._of: dict[str, deque[_Took]] = {}

    def add(self, name: str, seconds: float, rows: int) -> None:
        """A call has ended; `rows` is 0 where nobody knows."""
        self._of.setdefault(name, deque(maxlen=KEPT)).append(_Took(seconds, rows))

    def limit_s(self, name: str, rows: int, limits: Deadlines) -> float:
        """Seconds after which a call is late: never before `late_s`, nor after `call_s`.

        One of more rows than usual gets more time in proportion: a validation, say.
        """
        took = list(self._of.get(name, ()))
        if len(took) < KNOWN_AFTER:
            return limits.call_s
        usual = statistics.median(call.rows for call in took)
        share = max(1.0, rows / usual) if usual else 1.0
        median = statistics.median(call.seconds for call in took)
        return min(limits.call_s, max(limits.late_s, LATE_AT * median * share))
