"""Waiting for the answers of a group call: who has answered, who failed, who is late.

Past the deadline, and in a deadlock before it (`verl_like.calls.deadlock`), the error shows the
workers' own Python stacks and the likely cause (`verl_like.calls.stacks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


class CallAnswers:
    """What is known of one group call: what its ranks answered, and who has not."""

    def __init__(self, transport: Transport, name: str, pending: Sequence[Pending]) -> None:
        self.transport, self.name, self.pending = transport, name, list(pending)
        self.open: dict[object, Pending] = {call.header: call for call in pending}
        """By the reference to the header: calls without an answer."""
        self.headers: dict[int, Header] = {}
        self.failures: dict[int, BaseException] = {}

    def read(self, ready: Iterable[object]) -> None:
        """Read the headers that are there."""
        for reference in ready:
            call = self.open.pop(reference)
            try:
                header = self.transport.fetch_header(reference)
            except WorkerError as error:  # it died, or its answer cannot travel
                self.failures[call.rank] = type(error)(f"{self.where(call)}: {error}")
                continue
            self.headers[call.rank] = header
            self.transport.finished.append(header)
            if header.error is not None:
                self.failures[call.rank] = header.error.rebuild(self.where(call))

    def where(self, call: Pending) -> str:
        """The call of one rank, in words."""
        return f"{self.name}, {self.transport.describe(call.rank, call.role)}"

    def give_up(self, lost: dict[int, str]) -> None:
        """Fail the calls on ranks that are gone."""
        for reference, call in list(self.open.items()):
            if call.rank in lost:
                del self.open[reference]
                died = WorkerDiedError(f"{self.where(call)}: {lost[call.rank]}")
                self.failures[call.rank] = died

    def grace_s(self) -> float:
        """Seconds that those without an answer get after the first failure."""
        died = any(isinstance(failure, WorkerDiedError) for failure in self.failures.values())
        limit_s = self.transport.deadlines.grace_s
        return min(limit_s, AFTER_DEATH_S) if died else limit_s

    def late(self) -> str:
        """Who has not answered; of many the first ones, and how many more."""
        late = list(self.open.values())
        first = [self.transport.describe(call.rank, call.role) for call in late[:NAMED_LATE]]
        more = len(late) - len(first)
        return ", ".join(first) + (f" and {more} more" if more else "")


def wait_for_calls(
    calls: CallAnswers,
    timeout: float | None = None,
    setting: str = "call_s",
    since: float | None = None,
    rows: int = 0,
    gives_up_soon: bool = False,
) -> list[Header]:
    """The headers of a group call, in rank order; raises the first failure once it is certain.

    When one rank fails, the others get a grace period before the error is raised, a short one when
    it died: they may be stuck in a collective that it left. `setting` names the deadline, unless
    `timeout` is given; it runs `since` then. A call of so many `rows` may be late before `call_s`.
    What is known is not waited for again. A call that `gives_up_soon` is one whose ranks wait for
    each other, or for another pool, only for a moment.
    """
    transport, name = calls.transport, calls.name
    limits = transport.deadlines
    transport.report_abandoned()
    limit, way_out = _deadline(transport, name, timeout, setting, rows)
    is_first = setting == "call_s" and not transport.call_times.has(name)
    what = f"{name}, the first of its calls, which loads or compiles" if is_first else name
    clock = WaitClock(what, limit, limits.warn_s, since)
    deadlocks = DeadlockWatch(transport, gives_up_soon=gives_up_soon)
    failed_at: float | None = None

    while True:
        calls.read(transport.wait(list(calls.open), clock.remaining()))
        if not calls.open:
            break
        calls.give_up(transport.lost(p.rank for p in calls.open.values()))
        if not calls.failures:
            transport.check_companions(name)
        if calls.failures:
            failed_at = clock.age_s if failed_at is None else failed_at
            grace_s = calls.grace_s()
            if clock.age_s - failed_at >= grace_s:
                break
        elif clock.over():
            why = f"{calls.late()} did not finish within {limit:.1f} s"
            raise WaitTimeoutError(_diagnosis(calls, why, way_out))
        elif deadlocks.stuck([p.rank for p in calls.open.values()]):
            why = (
                f"{calls.late()} stood still for {deadlocks.deadlock_s:g} s, "
                "and nobody that could end it moves"
            )
            raise WaitTimeoutError(_diagnosis(calls, why, "raise watch.deadlock_s"))
        clock.warn_if_old(calls.late())

    if calls.failures:
        error = _with_others([calls.failures[rank] for rank in sorted(calls.failures)])
        if calls.open:
            error.add_note(f"not finished {grace_s:.0f} s after the failure: {calls.late()}")
        raise error
    return [calls.headers[call.rank] for call in calls.pending]


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
    pending = [Pending(rank, header, header, name) for rank, header in enumerate(headers)]
    calls = CallAnswers(transport, f"start of {name}", pending)
    return wait_for_calls(calls, setting="start_s")


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


def _diagnosis(calls: CallAnswers, what: str, way_out: str) -> str:
    transport = calls.transport
    stacks = transport.stacks(STACKS_S)
    lines = [
        f"{calls.name}: {what}.",
        likely_cause(stacks, [p.rank for p in calls.open.values()]),
    ]
    for rank in range(transport.world_size):
        lines.append(f"--- stack of {transport.describe(rank)}\n{stacks.get(rank, 'no answer')}")
    lines.append(f"If the work is only slow, {way_out}.")
    return "\n".join(lines)
