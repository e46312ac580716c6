"""Futures of calls on a group, and the loop that waits for them.

A future holds references to chunks on the workers; `get()` brings them to the driver.

    ref = reference.compute_ref_log_prob.remote(batch)
    values = critic.compute_values.remote(batch)
    update = critic.update_critic.remote(values)    # Ray sends chunks from worker to worker
    ref, values = gather(ref, values)               # waits for both, even if one fails

`wait_for` is the only loop that waits. It reads all answers by one request if they come within a
second. Otherwise it looks for ranks that are lost, late, or stuck.
"""

from __future__ import annotations

import functools
import logging
import math
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_like.calls.deadlines import LOOK_FROM, STACKS_S, WaitClock, in_daemon
from verl_like.calls.messages import NOT_ARRIVED, Header, Pending, answer_payload
from verl_like.calls.result import CallResult
from verl_like.calls.transport import Transport
from verl_like.errors import DispatchError, WaitTimeoutError, WorkerDiedError, WorkerError, join_few

if TYPE_CHECKING:
    from verl_like.calls.diagnose import HangWatch


logger = logging.getLogger(__name__)
FIRST_WAIT_S = 1.0
"""Seconds in which all answers are awaited by one request, before any check of the ranks."""
AFTER_DEATH_S = 1.0
"""Seconds in which the other ranks may still finish after one has died.

The death explains their failures.
"""
MAX_NOTES = 8
"""Number of other failures that the notes of a raised failure name."""
FutureOutcome = tuple[Any, Exception | None]
"""The value of a future, or its error."""


class WorkerFuture:
    """The result of one call on a group, as references to the answers of its workers."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        pending: Sequence[Pending],
        collect: Callable[[list[Header], list[Any]], Any],
        chunks: Sequence[Pending] = (),
        rows: int = 0,
        argument_refs: Sequence[Any] = (),
        limit: tuple[float, str] | None = None,
    ):
        """Initialize the future; `collect` turns headers and payloads, by rank, into the result.

        `chunks` are the answers whose payloads are collected. `rows` is the length of the call's
        batches, or 0. `argument_refs` holds references to the arguments until the call has ended,
        because other calls may share them. `limit` replaces the deadline of calls: the seconds, and
        advice on how to raise them.
        """
        self.name, self.transport, self.rows = name, transport, rows
        self.pending, self.chunks = list(pending), list(chunks)
        self._collect, self._argument_refs, self._limit = collect, argument_refs, limit
        self._launched = time.time()
        self._outcome: tuple[Any, BaseException | None] | None = None

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result, at most `timeout` seconds, by default until the call's deadline."""
        if self._outcome is None:
            for _, error in wait_for({0: self}, timeout):
                if error is not None:
                    raise error
        assert self._outcome is not None, "a call that was waited for has ended"
        value, failure = self._outcome
        if failure is not None:
            raise failure
        return value

    def batch(self, timeout: float | None = None) -> Any:
        """Wait for the result and return its batch, without its metrics."""
        batch = CallResult.of(self.get(timeout)).batch
        if batch is None:
            raise DispatchError(
                f"{self.name} returned no batch, but its future was passed on as a batch."
            )
        return batch

    def done(self) -> bool:
        """Return whether `get` would return (or raise) at once."""
        headers = [call.header for call in self.open]
        return self._outcome is not None or len(self.transport.wait(headers, 0.0)) == len(headers)

    @property
    def open(self) -> list[Pending]:
        """The calls of the ranks that have not answered."""
        return [call for call in self.pending if call.answer is None and call.failure is None]

    @property
    def failures(self) -> list[BaseException]:
        """The failures of ranks, in rank order."""
        return [call.failure for call in self.pending if call.failure is not None]

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks that were lost during the wait for this call."""
        return [call.rank for call in self.pending if isinstance(call.failure, WorkerDiedError)]

    def describe(self, call: Pending) -> str:
        """Describe the call of one rank."""
        return f"{self.name}, {self.transport.describe(call.rank, call.role)}"

    def describe_late(self) -> str:
        """Describe the ranks without an answer: the first ones, and how many more."""
        return join_few([self.transport.describe(call.rank, call.role) for call in self.open])

    def record(self, call: Pending, answer: Any) -> None:
        """Record a rank's answer, or the error if it died or its answer cannot be sent."""
        if isinstance(answer, WorkerError):
            call.failure = type(answer)(f"{self.describe(call)}: {answer}")
            return
        call.answer = header = Header.read(answer)
        self.transport.finished.append(header)
        if header.error is not None:
            call.failure = header.error.rebuild(self.describe(call))
        elif call.is_one_answer:
            call.value = answer_payload(answer)

    def build_result(self) -> bool:
        """Build the result if all answers are here; return whether `get` has an outcome now."""
        if self._outcome is not None or self.open:
            return self._outcome is not None
        failures = self.failures
        if failures:
            self.fail(_with_others(failures))
            return True
        headers = [call.answer for call in self.pending if call.answer is not None]
        computed = max(header.end - header.start for header in headers)
        waited = max(header.end for header in headers) - self._launched
        self.transport.call_times.add(self.name, max(computed, waited), self.rows)
        try:
            self._outcome = self._collect(headers, [call.value for call in self.pending]), None
        except Exception as error:  # noqa: BLE001 - stored, and raised at every `get`
            self._outcome = None, error
        for call in self.pending:
            call.value = None
        self._argument_refs = ()
        return True

    def fail(self, failure: BaseException) -> None:
        """Store the failure, for every later `get`."""
        self._outcome, self._argument_refs = (None, failure), ()

    def __del__(self) -> None:
        """Let the transport report the failure of a call if its future was never read."""
        if getattr(self, "_outcome", True) is None:
            self.transport.abandoned.append((self.name, [p.header for p in self.pending]))

    def __repr__(self) -> str:
        state = "here" if self._outcome else "on their way"
        return f"<{type(self).__name__} {self.name}: {len(self.pending)} chunks, {state}>"

    def __str__(self) -> str:
        """The call, and the ranks without an answer."""
        late = self.describe_late()
        return f"{self.name} of {late}" if late else self.name


class DataProtoFuture(WorkerFuture):
    """The future of a `DataProto`, or of a `CallResult` if the method also returns metrics.

    If you pass it to a group with as many data-parallel ranks as it has chunks, Ray sends the
    chunks from worker to worker and not through the driver.

    Example:

        values = critic.compute_values.remote(batch)        # returns at once
        update = actor.update_actor.remote(values)          # gets the values without the driver
        metrics = update.get()
    """

    def fits(self, transport: Transport, num_chunks: int) -> bool:
        """Return whether `num_chunks` ranks of another group can get a chunk each by reference."""
        return len(self.chunks) == num_chunks and self.transport.kind == transport.kind

    @functools.cached_property
    def headers_of_chunks(self) -> list[Any]:
        """References to the headers of all chunks: one for each, or one for the whole list."""
        headers = [chunk.header for chunk in self.chunks]
        joined = self.transport.join(headers)
        return headers if joined is None else [joined]


def wait_for_start(transport: Transport, references: Sequence[Any]) -> list[Header]:
    """Wait until every rank has constructed its roles, and return the headers in rank order."""
    name = transport.processes[0].name
    pending = [Pending(rank, answer, answer, name) for rank, answer in enumerate(references)]
    limit = transport.deadlines.start_s, "raise timeouts.start_s"
    subject = f"start of {name}"
    future = WorkerFuture(subject, transport, pending, lambda headers, _: headers, limit=limit)
    headers: list[Header] = future.get()
    return headers


# ------------------------------------------------------------------------------------ the one wait


class _Wait:
    """The clock of one wait for a future, and the grace period of other ranks after a failure."""

    def __init__(self, future: WorkerFuture, timeout: float | None, since: float) -> None:
        self.future = future
        transport, name = future.transport, future.name
        limits, times = transport.deadlines, transport.call_times
        if timeout is not None:
            limit_s, self._remedy = timeout, "raise the timeout"
        elif future._limit is not None:
            limit_s, self._remedy = future._limit
        else:
            limit_s = times.limit_s(name, future.rows, limits)
            is_first = limit_s == limits.call_s
            self._remedy = "raise timeouts.call_s" if is_first else "raise timeouts.min_call_s"
        median_s, is_start = times.median_s(name), future._limit is not None
        # a process cannot show a stack before it has started
        self.look_from_s = math.inf if is_start else LOOK_FROM * (median_s or 0.0)
        is_first_call = median_s is None and not is_start and timeout is None
        suffix = ", the first of its calls, which may load or compile" if is_first_call else ""
        self.clock = WaitClock(f"{name}{suffix}", limit_s, limits.warn_s, since)
        self._failed_at_s: float | None = None

    @property
    def late_ranks(self) -> list[int]:
        """The ranks without an answer."""
        return [call.rank for call in self.future.open]

    def check(self, stacks: Callable[[Transport], dict[int, str]]) -> WaitTimeoutError | None:
        """Fail the future if a rank failed a grace period ago, or return an error if it is late.

        After a failure, the other ranks may be stuck in a collective that the failed rank has left.
        A late call may be waited for again.
        """
        future, clock = self.future, self.clock
        failures = future.failures
        if failures:
            grace_s = future.transport.deadlines.grace_s
            if future.lost_ranks:
                grace_s = min(grace_s, AFTER_DEATH_S)
            self._failed_at_s = self._failed_at_s or clock.age_s
            if clock.age_s - self._failed_at_s >= grace_s:
                failure = _with_others(failures)
                late = future.describe_late()
                failure.add_note(f"not finished {grace_s:.0f} s after the failure: {late}")
                future.fail(failure)
                return None
        if failures or not clock.is_over():
            clock.warn_if_old(future.describe_late)
            return None
        from verl_like.calls.diagnose import describe_late_call, likely_cause

        summary = f"{future.describe_late()} did not finish within {clock.limit_s:.1f} s"
        explained = describe_late_call(
            f"{future.name}: {summary}.",
            likely_cause(stacks(future.transport), self.late_ranks),
            stacks(future.transport),
            future.transport,
        )
        return WaitTimeoutError(f"{explained}\nIf the work is only slow, {self._remedy}.")


def wait_for(
    futures: Mapping[int, WorkerFuture], timeout: float | None = None
) -> Iterator[tuple[int, WaitTimeoutError | None]]:
    """Wait for calls on one kind of backend, and yield the key of each future that has ended.

    An error comes with the key if the wait has passed its deadline; the call may then be waited
    for again. Each pool is checked once for all its calls.
    """
    began = time.monotonic()
    transports = dict.fromkeys(future.transport for future in futures.values())
    for transport in transports:
        transport.report_abandoned()
    _read_together(list(futures.values()), timeout)
    _read_payloads(list(futures.values()))
    waits: dict[int, _Wait] = {}
    for place, future in futures.items():
        if future.build_result():
            yield place, None
        else:
            waits[place] = _Wait(future, timeout, began)
    if not waits:
        return

    from verl_like.calls.diagnose import HangWatch  # calls in this process have ended already

    watches = {transport: HangWatch(transport, began) for transport in transports}
    first = next(iter(transports))
    while waits:
        # the headers that come within the next second
        calls = {
            call.header: (wait.future, call) for wait in waits.values() for call in wait.future.open
        }
        seconds = min(wait.clock.remaining() for wait in waits.values())
        ready = first.wait(list(calls), seconds)
        for reference, (answer, lost) in zip(ready, _fetch_each(first, ready, 0.0), strict=True):
            future, call = calls[reference]
            future.record(call, lost or answer)
        _read_payloads([wait.future for wait in waits.values()])
        running = [wait for wait in waits.values() if not wait.future.build_result()]
        for transport, watch in watches.items():
            of_pool = [wait for wait in running if wait.future.transport is transport]
            _look(of_pool, transport, watch)
        stacks = functools.cache(lambda transport: transport.stacks(STACKS_S))
        for place, wait in list(waits.items()):
            error = None if wait.future.build_result() else wait.check(stacks)
            if error is not None or wait.future.build_result():
                del waits[place]
                yield place, error


def _read_together(futures: Sequence[WorkerFuture], timeout: float | None) -> None:
    """Read all answers by one request, if they come before any check of the ranks is due."""
    calls = [(future, call) for future in futures for call in future.open]
    if not calls:
        return
    seconds = [FIRST_WAIT_S] if timeout is None else [FIRST_WAIT_S, max(0.0, timeout)]
    for future in futures:
        limits = future.transport.deadlines
        seconds += [limits.call_s, limits.min_call_s, limits.warn_s]
        if future._limit is not None:
            seconds.append(future._limit[0])
    references = [call.header for _, call in calls]
    references += [call.payload for _, call in calls if not call.is_one_answer]
    values = calls[0][0].transport.fetch_together(references, min(seconds))
    if values is not None:
        payloads = iter(values[len(calls) :])
        for (future, call), answer in zip(calls, values, strict=False):
            future.record(call, answer)
            if not call.is_one_answer:
                call.value = next(payloads)


def _read_payloads(futures: Sequence[WorkerFuture]) -> None:
    """Read the payloads of all calls that every rank has answered, by one request."""
    absent = [
        (future, call)
        for future in futures
        if not future.open and not future.failures
        for call in future.pending
        if call.value is NOT_ARRIVED
    ]
    if absent:
        references = [call.payload for _, call in absent]
        payloads = _fetch_each(absent[0][0].transport, references, FIRST_WAIT_S)
        for (future, call), (value, lost) in zip(absent, payloads, strict=True):
            call.value = value
            if lost is not None:
                future.record(call, lost)


def _fetch_each(
    transport: Transport, references: Sequence[Any], seconds: float
) -> list[tuple[Any, WorkerError | None]]:
    """Return the value behind each reference, or the error if it is lost."""
    together = transport.fetch_together(references, seconds) if references else []
    if together is not None:
        return [(value, None) for value in together]
    values: list[tuple[Any, WorkerError | None]] = []
    for reference in references:
        try:
            values.append((transport.fetch(reference), None))
        except WorkerError as error:
            values.append((None, error))
    return values


def _look(waits: Sequence[_Wait], transport: Transport, watch: HangWatch) -> None:
    """Look for ranks of a pool that are lost or stuck, and fail the calls that wait for them."""
    lost = transport.lost(sorted({rank for wait in waits for rank in wait.late_ranks}))
    for wait in waits:
        for call in wait.future.open:
            if call.rank in lost:
                wait.future.record(call, WorkerDiedError(lost[call.rank]))

    well = [wait for wait in waits if not wait.future.failures]
    try:
        names = ", ".join(dict.fromkeys(wait.future.name for wait in well))
        if well:
            for other in transport.companions:
                other.check_idle(names)
    except WorkerDiedError as error:
        for wait in well:
            wait.future.fail(WorkerDiedError(str(error)))
        well = []
    slow = [wait for wait in well if wait.clock.age_s > wait.look_from_s]
    watch.look_if_due({wait.future.name: wait.late_ranks for wait in slow})


def _with_others(failures: Sequence[BaseException]) -> BaseException:
    """Return the most informative failure (a death, if any), with the others as notes."""
    first = next((f for f in failures if isinstance(f, WorkerDiedError)), failures[0])
    others = [f for f in failures if (type(f), str(f)) != (type(first), str(first))]
    _note_some(first, [f"another rank raised {type(other).__name__}: {other}" for other in others])
    same = len(failures) - len(others)
    if same > 1:
        first.add_note(f"{same} ranks failed with this error")
    return first


def _note_some(error: BaseException, notes: Sequence[str]) -> None:
    for note in notes[:MAX_NOTES]:
        error.add_note(note)
    rest = notes[MAX_NOTES:]
    if rest:
        error.add_note(f"and {len(rest)} more failure{'s' * (len(rest) > 1)}")


# -------------------------------------------------------------------------------- several futures


class _AbandonedError(WaitTimeoutError):
    """`gather` stopped waiting for a call, because another call had failed."""


def gather(*futures: Any, timeout: float | None = None, grace_s: float | None = None) -> list[Any]:
    """Wait for all the futures and return their results in order.

        futures = critic.compute_values.remote(batch), ref.compute_ref_log_prob.remote(batch)
        values, ref_log_probs = gather(*futures)

    It waits for all of them, even when one fails. A failure is logged at once if other calls still
    run.

    Args:
        futures: the futures of calls, which may belong to several groups.
        timeout: longest wait in seconds; by default, each call's deadline.
        grace_s: the wait ends this many seconds after a failure, and at most a second after a
            worker's death. Use it for calls of two groups that wait for each other.

    Raises:
        WorkerDiedError: the first worker's death. If no worker died, the first failure in order is
            raised. The error's attribute `others` has the other failures, and its notes name up to
            eight of them.
    """
    arrived: queue.SimpleQueue[tuple[int, FutureOutcome]] = queue.SimpleQueue()
    by_kind: dict[object, dict[int, Any]] = defaultdict(dict)
    """The calls of one kind of backend share one wait; any other future has its own."""
    for place, future in enumerate(futures):
        kind = future.transport.kind if isinstance(future, WorkerFuture) else place
        by_kind[kind][place] = future
    for of_kind in by_kind.values():
        if len(futures) == 1:
            _wait_in_turn(of_kind, timeout, arrived)
        else:
            in_daemon("gather", _wait_in_turn, of_kind, timeout, arrived)

    outcomes: dict[int, FutureOutcome] = {}
    ends_at: float | None = None
    while len(outcomes) < len(futures):
        left_s = None if ends_at is None else max(0.0, ends_at - time.monotonic())
        try:
            place, outcome = arrived.get(timeout=left_s)
        except queue.Empty:
            for n, future in enumerate(futures):
                words = f"{future}: not finished {grace_s:g} s after the failure"
                outcomes.setdefault(n, (None, _AbandonedError(words)))
            break
        outcomes[place] = outcome
        error = outcome[1]
        if error is None or len(outcomes) == len(futures):
            continue
        if grace_s is not None:
            if isinstance(error, WorkerDiedError):
                grace_s, ends_at = min(grace_s, AFTER_DEATH_S), None
            ends_at = ends_at or time.monotonic() + grace_s
        left = join_few([str(future) for n, future in enumerate(futures) if n not in outcomes])
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        logger.error("%s failed: %s. Waiting for %s.", futures[place], first_line, left)

    errors = [error for _, (_, error) in sorted(outcomes.items()) if error is not None]
    if not errors:
        return [outcomes[place][0] for place in range(len(futures))]
    errors.sort(key=lambda e: (not isinstance(e, WorkerDiedError), isinstance(e, _AbandonedError)))
    first, *others = errors
    first.others = others  # type: ignore[attr-defined]
    message, *texts = [f"{type(error).__name__}: {error}" for error in errors]
    _note_some(first, [f"also failed: {text}" for text in dict.fromkeys(texts) if text != message])
    raise first


def _wait_in_turn(
    futures: Mapping[int, Any],
    timeout: float | None,
    arrived: queue.SimpleQueue[tuple[int, FutureOutcome]],
) -> None:
    """Wait for the futures, and put the key and the outcome of each into the queue as it comes."""
    left = dict(futures)
    try:
        ended: Iterable[tuple[int, Exception | None]] = ((place, None) for place in futures)
        if all(isinstance(future, WorkerFuture) for future in futures.values()):
            ended = wait_for(futures, timeout)
        for place, error in ended:
            outcome: FutureOutcome = None, error
            if error is None:
                try:
                    outcome = futures[place].get(timeout), None
                except Exception as failure:  # noqa: BLE001 - `gather` raises it, with all others
                    outcome = None, failure
            del left[place]
            arrived.put((place, outcome))
    except Exception as error:  # noqa: BLE001 - it is the error of every call that is left
        for place in left:
            arrived.put((place, (None, error)))
