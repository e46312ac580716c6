"""Waiting for the answers of a group call: who has answered, who failed, who is late.

Past the deadline, and in a deadlock before it (`verl_like.calls.deadlock`), the error shows the
workers' own Python stacks and the likely cause (`verl_like.calls.stacks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from verl_like.calls.deadlock import DeadlockWatch
from verl_like.calls.messages import Header, Pending
from verl_like.calls.stacks import likely_cause
from verl_like.calls.transport import Transport
from verl_like.calls.waiting import WaitClock
from verl_like.errors import WaitTimeoutError, WorkerDiedError, WorkerError

NAMED_LATE = 8
"""Ranks that a message names as late, at most."""
STACKS_S = 5.0
"""How long a process has to show its stack before it is asked by signal."""
AFTER_DEATH_S = 1.0
"""What the other ranks get to finish, at most, when one has died: its death explains the rest."""


@dataclass(frozen=True)
class KnownAnswers:
    """What the waits for one call have found so far, by rank."""

    headers: dict[int, Header] = field(default_factory=dict)
    failures: dict[int, BaseException] = field(default_factory=dict)


def wait_for_calls(
    transport: Transport,
    name: str,
    pending: Sequence[Pending],
    timeout: float | None = None,
    setting: str = "call_s",
    since: float | None = None,
    rows: int = 0,
    known: KnownAnswers | None = None,
    gives_up_soon: bool = False,
) -> list[Header]:
    """The headers of a group call, in rank order; raises the first failure once it is certain.

    When one rank fails, the others get a grace period before the error is raised, a short one when
    it died: they may be stuck in a collective that it left. `setting` names the deadline, unless
    `timeout` is given; it runs `since` then. A call of so many `rows` may be late before `call_s`.
    What is `known` is not waited for again; what is found is added to it. A call that
    `gives_up_soon` is one whose ranks wait for each other, or for another pool, only for a moment.
    """
    known = KnownAnswers() if known is None else known
    limits = transport.deadlines
    transport.report_abandoned()
    limit, way_out = _deadline(transport, name, timeout, setting, rows)
    is_first = setting == "call_s" and not transport.call_times.has(name)
    what = f"{name}, the first of its calls, which loads or compiles" if is_first else name
    clock = WaitClock(what, limit, limits.warn_s, since)
    deadlocks = DeadlockWatch(transport, gives_up_soon=gives_up_soon)
    calls = _OpenCalls(transport, name, pending, known)
    failed_at: float | None = None

    while True:
        calls.read(transport.wait(list(calls.open), clock.remaining()))
        if not calls.open:
            break
        calls.give_up(transport.lost_or_stopped(p.rank for p in calls.open.values()))
        if not calls.failures:
            transport.check_companions(name)
        if calls.failures:
            failed_at = clock.age_s if failed_at is None else failed_at
            grace_s = calls.grace_s(limits.grace_s)
            if clock.age_s - failed_at >= grace_s:
                break
        elif clock.over():
            why = f"{calls.late()} did not finish within {limit:.1f} s"
            raise WaitTimeoutError(_diagnosis(transport, why, calls, way_out))
        elif deadlocks.stuck([p.rank for p in calls.open.values()]):
            why = (
                f"{calls.late()} stood still for {deadlocks.deadlock_s:g} s, "
                "and nobody that could end it moves"
            )
            raise WaitTimeoutError(_diagnosis(transport, why, calls, "raise watch.deadlock_s"))
        clock.warn_if_old(calls.late())

    calls.end()
    if calls.failures:
        error = _with_others([calls.failures[rank] for rank in sorted(calls.failures)])
        if calls.open:
            error.add_note(f"not finished {grace_s:.0f} s after the failure: {calls.late()}")
        raise error
    return [known.headers[p.rank] for p in pending]


def _deadline(
    transport: Transport, name: str, timeout: float | None, setting: str, rows: int
) -> tuple[float, str]:
    """Seconds that a call may take, and what to do where they are too few."""
    if timeout is not None:
        return timeout, "give more time"
    limits = transport.deadlines
    limit: float = getattr(limits, setting)
    if setting == "call_s":
        limit = transport.call_times.limit_s(name, rows, limits)
        setting = setting if limit == limits.call_s else "late_s"
    return limit, f"raise watch.{setting}"


def wait_for_start(transport: Transport, headers: Sequence[object]) -> list[Header]:
    """What every rank says when its roles are constructed, of these references in rank order."""
    name = transport.facts[0].name
    calls = [Pending(rank, header, header, name) for rank, header in enumerate(headers)]
    return wait_for_calls(transport, f"start of {name}", calls, setting="start_s")


def in_words(transport: Transport, calls: Sequence[Pending]) -> str:
    """The ranks of these calls; of many the first ones, and how many more."""
    first = [transport.describe(p.rank, p.role) for p in calls[:NAMED_LATE]]
    more = len(calls) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")


class _OpenCalls:
    """The calls of one wait that are not answered, and what the others answered."""

    def __init__(
        self, transport: Transport, name: str, pending: Sequence[Pending], known: KnownAnswers
    ):
        self.transport, self.name, self.known = transport, name, known
        self.headers: dict[int, Header] = {}
        self.failures: dict[int, BaseException] = {}
        self.open: dict[object, Pending] = {}
        for call in pending:
            if call.rank in known.failures:
                self.failures[call.rank] = known.failures[call.rank]
            elif call.rank not in known.headers:
                self.open[call.header] = call

    def read(self, ready: Iterable[object]) -> None:
        """Read the headers that are there."""
        for reference in ready:
            call = self.open.pop(reference)
            try:
                self.headers[call.rank] = header = self.transport.fetch_header(reference)
            except WorkerDiedError as died:
                self.failures[call.rank] = WorkerDiedError(f"{self._where(call)}: {died}")
            except WorkerError as error:
                self.failures[call.rank] = WorkerError(f"{self._where(call)}: {error}")
            else:
                if header.error is not None:
                    self.failures[call.rank] = header.error.rebuild(self._where(call))

    def _where(self, call: Pending) -> str:
        return f"{self.name}, {self.transport.describe(call.rank, call.role)}"

    def give_up(self, lost: dict[int, str]) -> None:
        """Fail the calls on ranks that are gone."""
        for reference, call in list(self.open.items()):
            if call.rank in lost:
                del self.open[reference]
                self.failures[call.rank] = WorkerDiedError(
                    f"{self._where(call)}: {lost[call.rank]}"
                )

    def end(self) -> None:
        """The wait is over: what it has found is known."""
        self.transport.finished.extend(self.headers.values())
        self.known.headers.update(self.headers)
        self.known.failures.update(self.failures)

    def grace_s(self, limit_s: float) -> float:
        """Seconds that those without an answer get after the first failure."""
        died = any(isinstance(failure, WorkerDiedError) for failure in self.failures.values())
        return min(limit_s, AFTER_DEATH_S) if died else limit_s

    def late(self) -> str:
        """Who has not answered."""
        return in_words(self.transport, list(self.open.values()))


def _with_others(failures: list[BaseException]) -> BaseException:
    """The failure that explains most: a death before an exception.

    The others become its notes, unless they are the same.
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


def _diagnosis(transport: Transport, what: str, calls: _OpenCalls, way_out: str) -> str:
    stacks = transport.stacks(STACKS_S)
    lines = [
        f"{calls.name}: {what}.",
        likely_cause(stacks, [p.rank for p in calls.open.values()]),
    ]
    for rank in range(transport.world_size):
        lines.append(f"--- stack of {transport.describe(rank)}\n{stacks.get(rank, 'no answer')}")
    lines.append(f"If the work is only slow, {way_out}.")
    return "\n".join(lines)
