"""Deadlines: every wait has a name and a limit, and says who waits for whom when it grows old.

`Deadlines` are the limits of a group; `WaitClock` is the clock of one wait; `CallTimes` says from
when on a call is late, by how long those of its method took before. Waiting for the answers of a
group call is in `verl_like.calls.answers`.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from verl_like.errors import ConfigError, nearest

LATE_AT = 10.0
"""A call is late at so many times the median of its own."""
KEPT = 25
"""Calls of a method that the median is of."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deadlines:
    """How long each kind of wait may take, in seconds."""

    connect_s: float = 120.0
    """Until Ray's cluster is joined, or started here."""
    placement_s: float = 120.0
    """Until the cluster gives a pool its places."""
    start_s: float = 180.0
    """Until the processes are there and their roles constructed."""
    rendezvous_s: float = 300.0
    """Until all ranks have met to open a process group."""
    call_s: float = 7200.0
    """A call on a group, at most; on CPUs also a collective inside one."""
    collective_s: float = 1800.0
    """A collective of GPUs, from when the first rank is there: then NCCL ends the process."""
    late_s: float = 60.0
    """A call of a method that has been made before is late at ten times its median, not before
    this."""
    deadlock_s: float = 15.0
    """A call has failed whose ranks have stood still for so long, waiting for each other; in a
    weight sync on one node for a quarter of it."""
    warn_s: float = 60.0
    """The age at which a wait is logged for the first time, then at twice that age, and so on."""
    grace_s: float = 8.0
    """What the other ranks get to finish when one has failed."""

    @classmethod
    def settings(cls) -> dict[str, float]:
        """What a configuration may set, with the defaults."""
        return {name: seconds for name, seconds in asdict(cls()).items() if name != "grace_s"}

    @classmethod
    def of(cls, settings: Mapping[str, float]) -> Deadlines:
        """Deadlines from a configuration's settings."""
        known = cls.settings()
        for name, seconds in settings.items():
            if name not in known:
                raise ConfigError(
                    f"watch.{name} is no deadline.{nearest(name, known)} There are "
                    f"{', '.join(known)}."
                )
            if seconds <= 0:
                raise ConfigError(f"watch.{name}={seconds}: a deadline is above 0 seconds.")
        return cls(**settings)


class WaitClock:
    """The clock of one named wait: warns as it doubles its age, tells when the deadline is over."""

    def __init__(self, what: str, limit_s: float, warn_s: float, since: float | None = None):
        """Starts to run at once, or did so `since` a reading of `time.monotonic`."""
        self.what, self.limit_s, self.next_warning_s = what, limit_s, warn_s
        self.began = time.monotonic() if since is None else since

    @property
    def age_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self.began

    def remaining(self, slice_s: float = 1.0) -> float:
        """Seconds to wait before looking again; 0 when the deadline has passed."""
        return max(
            0.0,
            min(slice_s, self.limit_s - self.age_s, max(self.next_warning_s - self.age_s, 0.01)),
        )

    def over(self) -> bool:
        """Whether the deadline has passed."""
        return self.age_s >= self.limit_s

    def warn_if_old(self, waiting_for: Callable[[], str]) -> None:
        """Log who waits for whom, once per doubling of the age."""
        if self.age_s >= self.next_warning_s:
            logger.warning(
                "%s: waiting for %s since %.0f s (limit %.0f s)",
                self.what,
                waiting_for(),
                self.age_s,
                self.limit_s,
            )
            self.next_warning_s *= 2


class CallTimes:
    """The last calls of every method of a group; several threads may add and ask."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        """From launch to the last rank's answer."""
        self._rows: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=KEPT))

    def add(self, name: str, seconds: float, rows: int) -> None:
        """A call has ended; `rows` is 0 where nobody knows."""
        self._rows[name].append(rows)
        self._seconds[name].append(seconds)

    def has(self, name: str) -> bool:
        """Whether a call of this method has ended: the first one may take much longer."""
        return name in self._seconds

    def limit_s(self, name: str, rows: int, limits: Deadlines) -> float:
        """Seconds after which a call is late: never before `late_s`, nor after `call_s`.

        One of more rows than usual gets more time in proportion: a validation, say. Of two calls
        the slower one counts, and the one of fewer rows: the first ones compile and fill caches.
        """
        if not self.has(name):
            return limits.call_s
        usual_s = statistics.median_high(list(self._seconds[name]))
        usual = statistics.median_low(list(self._rows[name]))
        if rows > 0 and usual == 0:
            return limits.call_s  # one without rows says nothing of one that has some
        share = max(1.0, rows / usual) if usual else 1.0
        return min(limits.call_s, max(limits.late_s, LATE_AT * usual_s * share))
