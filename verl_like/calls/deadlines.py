"""Time limits of calls and other waits, clocks that watch them, and threads for blocking calls.

    limits = Deadlines.from_settings({"call_s": 600.0})       # the section `timeouts`
    clock = WaitClock("the pool", limits.placement_s, limits.warn_s)
    limit_s = times.limit_s("update_actor", rows, limits)   # ten times the median, within limits

`verl_like.calls.diagnose` explains why a wait does not end.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from verl_like.errors import ConfigError, nearest

logger = logging.getLogger(__name__)
LATE_FACTOR = 10.0
"""A call is late if it takes this multiple of the median time of its method's calls."""
MAX_TIMES = 25
"""Number of a method's last calls that the median is computed from."""
LOOK_FROM = 2.0
"""The watch looks at calls that take longer than this multiple of their method's median."""
STACKS_S = 5.0
"""Seconds in which a process must send its stack before it gets a signal."""


@dataclass(frozen=True)
class Deadlines:
    """Limits of each kind of wait, in seconds; all but `grace_s` are keys in `timeouts`."""

    connect_s: float = 120.0
    """Until Ray's cluster is joined, or started here."""
    placement_s: float = 120.0
    """Until the cluster has allocated a pool's processes."""
    start_s: float = 180.0
    """Until the processes have started and constructed their roles."""
    rendezvous_s: float = 300.0
    """Until all ranks have met to open a process group."""
    call_s: float = 7200.0
    """For each call on a group; on CPUs also for each collective inside a call."""
    collective_s: float = 1800.0
    """For each GPU collective, from when its first rank enters; then NCCL ends the process."""
    min_call_s: float = 60.0
    """Lower bound of the limit for a method's later calls. The limit is ten times the median
    duration of its last calls, and more for a call of more rows."""
    warn_s: float = 60.0
    """The age at which a wait is logged for the first time, then at twice that age, and so on."""
    grace_s: float = 8.0
    """Seconds in which the other ranks may still finish after one has failed; 1 s after a death."""

    @classmethod
    def settings(cls) -> dict[str, float]:
        """Return the deadlines that a configuration may set, with their defaults."""
        return {name: seconds for name, seconds in asdict(cls()).items() if name != "grace_s"}

    @classmethod
    def from_settings(cls, settings: Mapping[str, float]) -> Deadlines:
        """Return the deadlines that a configuration sets."""
        known = cls.settings()
        for name, seconds in settings.items():
            if name not in known:
                raise ConfigError(
                    f"timeouts.{name} does not exist.{nearest(name, known)} The keys are "
                    f"{', '.join(known)}."
                )
            if seconds <= 0:
                raise ConfigError(f"timeouts.{name}={seconds}: a timeout must be above 0 seconds.")
        return cls(**settings)


class WaitClock:
    """The clock of one named wait. It warns each time the age of the wait has doubled."""

    def __init__(self, summary: str, limit_s: float, warn_s: float, since: float | None = None):
        """Start now, or at `since`, a reading of `time.monotonic`."""
        self.summary, self.limit_s, self.next_warning_s = summary, limit_s, warn_s
        self.began = time.monotonic() if since is None else since

    @property
    def age_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self.began

    def remaining(self) -> float:
        """Return the seconds to wait before the next look, at most 1; 0 after the deadline."""
        until_warning = max(self.next_warning_s - self.age_s, 0.01)
        return max(0.0, min(1.0, self.limit_s - self.age_s, until_warning))

    def is_over(self) -> bool:
        """Return whether the deadline has passed."""
        return self.age_s >= self.limit_s

    def warn_if_old(self, waiting_for: Callable[[], str]) -> None:
        """Log who waits for whom, once per doubling of the age."""
        if self.age_s >= self.next_warning_s:
            logger.warning(
                "%s: waiting for %s for %.0f s (limit %.0f s)",
                self.summary,
                waiting_for(),
                self.age_s,
                self.limit_s,
            )
            self.next_warning_s *= 2


class CallTimes:
    """Duration and rows of the last calls of each method of a group; several threads may use it."""

    def __init__(self) -> None:
        self._calls: dict[str, deque[tuple[float, int]]] = defaultdict(
            lambda: deque(maxlen=MAX_TIMES)
        )

    def add(self, name: str, seconds: float, rows: int) -> None:
        """Record a call that has ended; `rows` is 0 if their number is not known."""
        self._calls[name].append((seconds, rows))

    def median_s(self, name: str) -> float | None:
        """Return the median duration of a method's calls, or None before the first has ended."""
        calls = list(self._calls.get(name, ()))
        return statistics.median_high(seconds for seconds, _ in calls) if calls else None

    def limit_s(self, name: str, rows: int, limits: Deadlines) -> float:
        """Return the seconds after which a call is late, between `min_call_s` and `call_s`.

        A call of more rows than usual, such as a validation, gets more time in proportion. After
        only two calls, the longer duration and the smaller number of rows count, because first
        calls compile and fill caches.
        """
        median_s = self.median_s(name)
        if median_s is None:
            return limits.call_s
        usual_rows = statistics.median_low(rows for _, rows in list(self._calls[name]))
        if rows > 0 and usual_rows == 0:
            return limits.call_s  # calls without rows do not predict a call with rows
        share = max(1.0, rows / usual_rows) if usual_rows else 1.0
        return min(limits.call_s, max(limits.min_call_s, LATE_FACTOR * median_s * share))


T = TypeVar("T")


def in_daemon(name: str, call: Callable[..., T], *arguments: Any) -> Future[T]:
    """Run a call in a daemon thread of this name, and return its future.

    Unlike the threads of an executor, it does not keep the process from ending.
    """
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised by result()
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
