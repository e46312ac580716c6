"""Waiting for the answers of a group call: who has answered, who failed, who is late.

Past the deadline, and in a deadlock before it (`verl_like.calls.deadlock`), the error shows the
workers' own Python stacks and the likely cause (`verl_like.calls.stacks`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from verl_like.calls.deadlock import DeadlockWatch
from verl_like.calls.messages import Header, Pending
from verl_like.calls.stacks import likely_cause, ranks_alike, ranks_in_words
from verl_like.calls.transport import Transport
from verl_like.calls.waiting import WaitClock
from verl_like.errors import WaitTimeoutError, WorkerDiedError, WorkerError, few

StacksOf = Callable[[], dict[int, str]]
SHOWN_STACKS = 8
"""Of stacks that differ, those of the fewest ranks."""
NOTED = 8
"""Of many failures, those that the notes of the one that is raised tell."""
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

    def note(self, reference: object, header: Header | WorkerError) -> None:
        """What a rank has answered; an error says that it died, or its answer cannot travel."""
        call = self.open.pop(reference)
        if isinstance(header, WorkerError):
            self.failures[call.rank] = type(header)(f"{self.where(call)}: {header}")
            return
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
        return few([self.transport.describe(p.rank, p.role) for p in self.open.values()])


class CallWait:
    """The wait for one group call: by when it is to end, and how.

    When one rank fails, the others get a grace period before the call has failed, a short one when
    it died: they may be stuck in a collective that it left.
    """

    def __init__(
        self,
        calls: CallAnswers,
        timeout: float | None = None,
        setting: str = "call_s",
        since: float | None = None,
        rows: int = 0,
        gives_up_soon: bool = False,
    ) -> None:
        """`setting` names the deadline, unless `timeout` is given; it runs `since` then.

        A call of so many `rows` may be late before `call_s`. One that `gives_up_soon` is one whose
        ranks wait for each other, or for another pool, only for a moment.
        """
        transport, name = calls.transport, calls.name
        self.calls, self.gives_up_soon = calls, gives_up_soon
        self.outcome: list[Header] | BaseException | None = None
        """Headers in rank order, or the first failure; None while the call is waited for."""
        limit, self._way_out = _deadline(transport, name, timeout, setting, rows)
        is_first = setting == "call_s" and not transport.call_times.has(name)
        what = f"{name}, the first of its calls, which loads or compiles" if is_first else name
        self.clock = WaitClock(what, limit, transport.deadlines.warn_s, since)
        self._failed_at: float | None = None

    @property
    def ranks(self) -> list[int]:
        """Those without an answer."""
        return [call.rank for call in self.calls.open.values()]

    def end_if_answered(self) -> None:
        """The outcome, if no rank is waited for."""
        calls = self.calls
        if calls.open:
            return
        failures = [calls.failures[rank] for rank in sorted(calls.failures)]
        headers = [calls.headers[call.rank] for call in calls.pending if not failures]
        self.outcome = _with_others(failures) if failures else headers

    def look(self, watch: DeadlockWatch, stuck: Sequence[int], stacks: StacksOf) -> None:
        """The outcome, if the call has failed, is late, or has a rank that waits in vain."""
        calls = self.calls
        if calls.failures:
            if self._failed_at is None:
                self._failed_at = self.clock.age_s
            grace_s = calls.grace_s()
            if self.clock.age_s - self._failed_at >= grace_s:
                failed = _with_others([calls.failures[rank] for rank in sorted(calls.failures)])
                if calls.open:
                    late = calls.late()
                    failed.add_note(f"not finished {grace_s:.0f} s after the failure: {late}")
                self.outcome = failed
                return
        elif self.clock.over():
            why = f"{calls.late()} did not finish within {self.clock.limit_s:.1f} s"
            self.outcome = WaitTimeoutError(_diagnosis(calls, why, self._way_out, stacks()))
            return
        elif not set(stuck).isdisjoint(self.ranks):
            why = (
                f"{calls.late()} stood still for {watch.deadlock_s:g} s, "
                "and nobody that could end it moves"
            )
            way_out = "raise watch.deadlock_s"
            self.outcome = WaitTimeoutError(_diagnosis(calls, why, way_out, stacks()))
            return
        self.clock.warn_if_old(calls.late)


def wait_for_calls(waits: Sequence[CallWait]) -> Iterator[int]:
    """Wait for calls on one transport; gives the place of each once it has its outcome.

    However many calls there are, they have one watch: ranks, companions and stacks are looked at
    once for all of them. What is known is not waited for again.
    """
    transport = waits[0].calls.transport
    transport.report_abandoned()
    watch = DeadlockWatch(transport, gives_up_soon=all(wait.gives_up_soon for wait in waits))
    left = dict(enumerate(waits))
    while left:
        _read_answers(transport, list(left.values()))
        for wait in left.values():
            wait.end_if_answered()
        open_waits = [wait for wait in left.values() if wait.outcome is None]
        if open_waits:
            _look(transport, open_waits, watch)
        ended = [place for place, wait in left.items() if wait.outcome is not None]
        for place in ended:
            del left[place]
        yield from ended


def _read_answers(transport: Transport, waits: Sequence[CallWait]) -> None:
    """Read the headers that come within the next moment."""
    call_of = {reference: wait.calls for wait in waits for reference in wait.calls.open}
    seconds = min(wait.clock.remaining() for wait in waits)
    ready = transport.wait(list(call_of), seconds)
    for reference, header in zip(ready, transport.fetch_headers(ready), strict=True):
        call_of[reference].note(reference, header)


def _look(transport: Transport, waits: Sequence[CallWait], watch: DeadlockWatch) -> None:
    """Look who is gone, and who stands still."""
    lost = transport.lost(sorted({rank for wait in waits for rank in wait.ranks}))
    if lost:
        for wait in waits:
            wait.calls.give_up(lost)
    well = [wait for wait in waits if not wait.calls.failures]
    stuck: Sequence[int] = ()
    if well:
        try:
            transport.check_companions(", ".join(dict.fromkeys(wait.calls.name for wait in well)))
        except WorkerDiedError as error:
            for wait in well:
                wait.outcome = WorkerDiedError(str(error))
        else:
            stuck = watch.stuck({rank for wait in well for rank in wait.ranks})
    stacks = functools.cache(lambda: transport.stacks(STACKS_S))
    for wait in waits:
        if wait.outcome is None:
            wait.look(watch, stuck, stacks)


def headers_of(wait: CallWait) -> list[Header]:
    """Wait for one call; raises its failure."""
    for _ in wait_for_calls([wait]):
        pass
    if isinstance(wait.outcome, BaseException):
        raise wait.outcome
    assert wait.outcome is not None, "a call that was waited for has ended"
    return wait.outcome


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
    return headers_of(CallWait(calls, setting="start_s"))


def _with_others(failures: list[BaseException]) -> BaseException:
    """The failure that explains most: a death before an exception.

    The others become its notes, unless they are the same.
    """
    first = next((f for f in failures if isinstance(f, WorkerDiedError)), failures[0])
    others = [f for f in failures if (type(f), str(f)) != (type(first), str(first))]
    note_some(first, [f"another rank raised {type(other).__name__}: {other}" for other in others])
    if (same := len(failures) - len(others)) > 1:
        first.add_note(f"{same} ranks raised this")
    return first


def note_some(error: BaseException, notes: Sequence[str]) -> None:
    """Add the first of these notes to an error, and how many more there are."""
    for note in notes[:NOTED]:
        error.add_note(note)
    if more := notes[NOTED:]:
        error.add_note(f"and {len(more)} more failures")


def _diagnosis(calls: CallAnswers, what: str, way_out: str, stacks: dict[int, str]) -> str:
    transport = calls.transport
    lines = [
        f"{calls.name}: {what}.",
        likely_cause(stacks, [p.rank for p in calls.open.values()]),
    ]
    silent = dict.fromkeys(range(transport.world_size), "no answer")
    shown = {rank: stacks.get(rank, words) for rank, words in silent.items()}
    alike = ranks_alike(shown)
    for ranks in alike[:SHOWN_STACKS]:
        first, *others = ranks
        same = f", and of {ranks_in_words(others)} the same" if others else ""
        lines.append(f"--- stack of {transport.describe(first)}{same}\n{shown[first]}")
    if more := alike[SHOWN_STACKS:]:
        lines.append(f"--- {len(more)} other stacks, of {ranks_in_words(chain(*more))}")
    lines.append(f"If the work is only slow, {way_out}.")
    return "\n".join(lines)
