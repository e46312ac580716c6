"""Every wait has a name and a deadline.

Past a warning age it says who waits for whom; past the deadline it raises.

What it raises shows the workers' own Python stacks and the likely cause (`verl_like.calls.stacks`).
Called by futures and by the backends when they start processes (`wait_for_calls`), and where one
waits for a cluster or its places (`Patience`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from verl_like.calls.stacks import likely_cause
from verl_like.calls.transport import Header, Pending, Transport
from verl_like.errors import ConfigError, WaitTimeoutError, WorkerDiedError, WorkerError, nearest

logger = logging.getLogger(__name__)
NAMED_LATE = 8
"""Ranks that a message names as late, at most."""


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
    """A call on a group; also a collective inside one."""
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


class Patience:
    """The clock of one named wait: warns when it grows old (and again at twice that age), tells
    when it is over.
    """

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


def wait_for_calls(
    transport: Transport,
    name: str,
    pending: Sequence[Pending],
    timeout: float | None = None,
    setting: str = "call_s",
    since: float | None = None,
) -> list[Header]:
    """The headers of a group call, in rank order; raises the first failure as soon as it is
    certain.

    When one rank fails, the others get a grace period before the error is raised: they may be stuck
    in a collective that it left. `setting` names the deadline, unless `timeout` is given; it runs
    `since` then.
    """
    limits = transport.deadlines
    transport.report_abandoned()
    patience = Patience(
        name, getattr(limits, setting) if timeout is None else timeout, limits.warn_s, since
    )
    calls = _OpenCalls(transport, name, pending)
    failed_at: float | None = None
    while True:
        calls.take(transport.wait(list(calls.open), patience.remaining()))
        if not calls.open:
            break
        calls.give_up(transport.lost(p.rank for p in calls.open.values()))
        if calls.failures:
            failed_at = patience.age_s if failed_at is None else failed_at
            if patience.age_s - failed_at >= limits.grace_s:
                break
        elif patience.over():
            way_out = f"raise watch.{setting}" if timeout is None else "give more time"
            raise WaitTimeoutError(_diagnosis(transport, patience, calls, way_out))
        patience.warn_if_old(calls.late())
    transport.finished.extend(calls.headers.values())
    if calls.failures:
        error = _with_others([calls.failures[rank] for rank in sorted(calls.failures)])
        if calls.open:
            error.add_note(f"not finished {limits.grace_s:.0f} s after the failure: {calls.late()}")
        raise error
    return [calls.headers[p.rank] for p in pending]


class _OpenCalls:
    """The calls of one wait that are not answered, and what the others answered."""

    def __init__(self, transport: Transport, name: str, pending: Sequence[Pending]):
        self.transport, self.name = transport, name
        self.open = {p.header: p for p in pending}
        self.headers: dict[int, Header] = {}
        self.failures: dict[int, BaseException] = {}

    def take(self, ready: Iterable[object]) -> None:
        """Read the headers that are there."""
        for reference in ready:
            call = self.open.pop(reference)
            where = f"{self.name}, {self.transport.describe(call.rank, call.role)}"
            try:
                self.headers[call.rank] = header = self.transport.fetch_header(reference)
            except WorkerDiedError as died:
                self.failures[call.rank] = WorkerDiedError(f"{where}: {died}")
            except WorkerError as error:
                self.failures[call.rank] = WorkerError(f"{where}: {error}")
            else:
                if header.error is not None:
                    self.failures[call.rank] = header.error.rebuild(where)

    def give_up(self, lost: dict[int, str]) -> None:
        """Fail the calls on ranks that are gone."""
        for reference, call in list(self.open.items()):
            if call.rank in lost:
                del self.open[reference]
                where = f"{self.name}, {self.transport.describe(call.rank, call.role)}"
                self.failures[call.rank] = WorkerDiedError(f"{where}: {lost[call.rank]}")

    def late(self) -> str:
        """Who has not answered; of many the first ones, and how many more."""
        first = [
            self.transport.describe(p.rank, p.role) for p in islice(self.open.values(), NAMED_LATE)
        ]
        more = len(self.open) - len(first)
        return ", ".join(first) + (f" and {more} more" if more else "")


def _with_others(failures: list[BaseException]) -> BaseException:
    """The failure that explains most: a death before an exception; others become notes unless they
    are the same.
    """
    first = next((f for f in failures if isinstance(f, WorkerDiedError)), failures[0])
    same = 0
    for other in failures:
        if other is not first and (type(other), str(other)) != (type(first), str(first)):
            first.add_note(f"another rank raised {type(other).__name__}: {other}")
        else:
            same += 1
    if same > 1:
        first.add_note(f"{same} ranks raised this")
    return first


def _diagnosis(transport: Transport, patience: Patience, calls: _OpenCalls, way_out: str) -> str:
    stacks = transport.stacks(5.0)
    lines = [
        f"{patience.what}: {calls.late()} did not finish within {patience.limit_s:.1f} s.",
        likely_cause(stacks, [p.rank for p in calls.open.values()]),
    ]
    for rank in range(transport.world_size):
        lines.append(f"--- stack of {transport.describe(rank)}\n{stacks.get(rank, 'no answer')}")
    lines.append(f"If the work is only slow, {way_out}.")
    return "\n".join(lines)
