"""How long the calls of a group took, and from when on one of them is late.

Every call that has ended well is noted, by its method; the limit of one follows from those.
"""

from __future__ import annotations

import statistics
from collections import deque

from verl_like.calls.waiting import Deadlines

LATE_AT = 10.0
"""A call is late at so many times the median of its own."""
KNOWN_AFTER = 3
"""Calls of a method before its median counts: the first ones compile and fill caches. Until then
the slowest counts."""
KEPT = 25
"""Calls of a method that the median is of."""


class _Calls:
    """The last calls of a method: seconds from launch to the last rank's answer, and rows."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=KEPT)
        self.rows: deque[int] = deque(maxlen=KEPT)


class CallTimes:
    """The last calls of every method of a group; several threads may add and ask."""

    def __init__(self) -> None:
        """None yet."""
        self._by_method: dict[str, _Calls] = {}

    def add(self, name: str, seconds: float, rows: int) -> None:
        """A call has ended; `rows` is 0 where nobody knows."""
        calls = self._by_method.get(name) or self._by_method.setdefault(name, _Calls())
        calls.rows.append(rows)
        calls.seconds.append(seconds)

    def has(self, name: str) -> bool:
        """Whether a call of this method has ended: the first one may take much longer."""
        return name in self._by_method

    def limit_s(self, name: str, rows: int, limits: Deadlines) -> float:
        """Seconds after which a call is late: never before `late_s`, nor after `call_s`.

        One of more rows than usual gets more time in proportion: a validation, say.
        """
        calls = self._by_method.get(name)
        if calls is None:
            return limits.call_s
        seconds, rows_before = list(calls.seconds), list(calls.rows)
        if rows <= min(rows_before) and LATE_AT * max(seconds) <= limits.late_s:
            return min(limits.call_s, limits.late_s)  # whatever the medians are, which cost more

        usual_s, usual = statistics.median(seconds), statistics.median(rows_before)
        if len(seconds) < KNOWN_AFTER:
            usual_s, usual = max(seconds), min(rows_before)
            if rows > 0 and usual == 0:
                return limits.call_s  # one without rows says nothing of one that has some
        share = max(1.0, rows / usual) if usual else 1.0
        return min(limits.call_s, max(limits.late_s, LATE_AT * usual_s * share))
