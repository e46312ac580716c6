"""Deadlines: every wait has a name and a limit, and says who waits for whom when it grows old.

`Deadlines` are the limits of a group; `WaitClock` is the clock of one wait. Waiting for the answers
of a group call is in `verl_like.calls.answers`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from verl_like.errors import ConfigError, nearest

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
    """A call on a group, at most; also a collective inside one."""
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

    def warn_if_old(self, waiting_for: str) -> None:
        """Log who waits for whom, once per doubling of the age."""
        if self.age_s >= self.next_warning_s:
            logger.warning(
                "%s: waiting for %s since %.0f s (limit %.0f s)",
                self.what,
                waiting_for,
                self.age_s,
                self.limit_s,
            )
            self.next_warning_s *= 2
