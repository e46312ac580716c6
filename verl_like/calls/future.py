"""Results that are still being made.

A future holds references to chunks on the workers; `get()` brings them here.

    ref = reference.compute_ref_log_prob.remote(batch)
    values = critic.compute_values.remote(batch)
    update = critic.update_critic.remote(values)    # its chunks travel from worker to worker
    ref, values = gather(ref, values)               # waits for both, also when one fails
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from verl_like.calls.answers import AFTER_DEATH_S, CallAnswers, CallWait, note_some, wait_for_calls
from verl_like.calls.messages import Header, Pending
from verl_like.calls.result import Result
from verl_like.calls.transport import Transport
from verl_like.errors import (
    DispatchError,
    WaitTimeoutError,
    WorkerDiedError,
    WorkerError,
    few,
)

logger = logging.getLogger(__name__)
SOON_S = 1.0
"""Answers that come within so long are read by one request, before anybody is looked for."""
Outcome = tuple[Any, Exception | None]
"""The value of a future, or its error."""
Answers = tuple[list[Header], list[Any]]
"""The headers of a call's ranks, and their payloads."""


class WorkerFuture:
    """The result of one call on a group, as references to the answers of its workers."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        pending: Sequence[Pending],
        collect: Callable[[list[Header], list[Any]], Any],
        form: str,
        chunks: Sequence[Pending],
        rows: int = 0,
    ):
        """Made by `BoundMethod`; `collect` turns headers and payloads into the result.

        `form` says how `chunks`, the answers that count, make the result: a `batch`, `metrics`, a
        `list`, the `first` of them, or by a function of its `own`, which only `collect` knows.
        `rows` are those of its batches, where they are known.
        """
        self.name = name
        self.transport = transport
        self.pending = list(pending)
        self.form = form
        self.chunks = list(chunks)
        self.keeps: list[Any] = []
        """What its call was sent, until the answers are here: other calls may share it."""
        self.gives_up_soon = False
        """Its ranks wait for each other only for a moment, unless they wait in vain."""
        self._collect = collect
        self._answers: Answers | None = None
        self._waited: list[Header] | BaseException | None = None
        """What a watched wait has found: headers whose payloads are not here, or the failure."""
        self.is_late = False
        """Some answer did not come soon, or tells of a failure: `get` watches for all of them."""
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._launched, self.rows = time.time(), rows
        self._calls = CallAnswers(transport, name, pending)

    def get(self, timeout: float | None = None) -> Any:
        """The result; waits for it, at most `timeout` seconds.

        Unless given, that is the group's own deadline for calls.
        """
        if self._outcome is None:
            try:
                self._outcome = self._collect(*self._fetch(timeout)), None
            except TimeoutError:
                raise
            except Exception as error:  # noqa: BLE001 - kept, and raised at every get
                self._outcome = None, error
        value, failure = self._outcome
        if failure is not None:
            raise failure
        return value

    def batch(self, timeout: float | None = None) -> Any:
        """The batch of the result, without the metrics beside it."""
        batch = Result.of(self.get(timeout)).batch
        if batch is None:
            raise DispatchError(
                f"{self.name} returned metrics alone, and was passed on as a batch."
            )
        return batch

    def _fetch(self, timeout: float | None) -> Answers:
        """Headers and payloads: at once if all is well and soon here, else by the watched wait."""
        began = time.monotonic()
        if not (self.has_answers or self.is_late):
            read_together([self], SOON_S if timeout is None else min(timeout, SOON_S))
        if self._answers is None and self._waited is None:
            for _ in watch_together([self], timeout, since=began):
                pass
        if self._answers is not None:
            answers, self._answers = self._answers, None
            return answers
        waited, self._waited = self._waited, None
        assert waited is not None, "a call that was waited for has ended"
        if isinstance(waited, BaseException):
            raise waited
        self._note_end(waited)
        return waited, [self.fetch_payload(pending) for pending in self.pending]

    @property
    def has_answers(self) -> bool:
        """Whether `get` has no worker to wait for, and nothing to fetch."""
        return self._outcome is not None or self._answers is not None

    def accept(self, headers: list[Header], payloads: list[Any]) -> None:
        """The answers of all ranks, as they were read; what failed is left to the watched wait."""
        self.is_late = any(header.error is not None for header in headers)
        if not self.is_late:
            self.transport.finished.extend(headers)
            self._note_end(headers)
            self._answers = headers, payloads

    def take_payloads(self, payloads: Iterator[Any]) -> None:
        """Take what all ranks have returned, once a watched wait has found their headers."""
        own = list(islice(payloads, len(self.pending)))
        headers, self._waited = self._waited, None
        if isinstance(headers, list):
            self._note_end(headers)
            self._answers = headers, own

    def _note_end(self, headers: Sequence[Header]) -> None:
        """How long the call took, its turn in the queue included; clocks of nodes may differ."""
        self.keeps = []
        computed = max(header.end - header.start for header in headers)
        waited = max(header.end for header in headers) - self._launched
        self.transport.call_times.add(self.name, max(computed, waited), self.rows)

    def fetch_payload(self, pending: Pending) -> Any:
        """What one rank has returned, once it has answered."""
        try:
            return self.transport.fetch_payload(pending)
        except WorkerError as error:
            raise type(error)(f"{self._calls.where(pending)}: {error}") from None

    def done(self) -> bool:
        """Whether `get` would return (or raise) at once."""
        headers = [p.header for p in self.pending]
        return self._outcome is not None or len(self.transport.wait(headers, 0.0)) == len(headers)

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks that waits for this call have found gone."""
        failures = self._calls.failures
        return [rank for rank, error in failures.items() if isinstance(error, WorkerDiedError)]

    @functools.cached_property
    def headers_of_chunks(self) -> list[Any]:
        """References to the headers of all chunks: each, or one to the list of them."""
        headers = [chunk.header for chunk in self.chunks]
        joined = self.transport.join(headers)
        return headers if joined is None else [joined]

    def can_be_passed_to(self, transport: Transport, num_chunks: int) -> bool:
        """Whether so many ranks of another group can each be given a chunk by reference."""
        is_split_so = self.form == "batch" and len(self.chunks) == num_chunks
        return is_split_so and self.transport.kind == transport.kind

    def __del__(self) -> None:
        """A failed call that nobody looked at is reported when the transport next waits."""
        if getattr(self, "_outcome", True) is None:
            self.transport.abandoned.append((self.name, [p.header for p in self.pending]))

    def __repr__(self) -> str:
        state = "here" if self._outcome else "on their way"
        return f"<{type(self).__name__} {self.name}: {len(self.pending)} chunks, {state}>"

    def __str__(self) -> str:
        """The call, and the ranks of which no answer is known."""
        late = self._calls.late()
        return f"{self.name} of {late}" if late else self.name


def read_together(futures: Sequence[WorkerFuture], seconds: float) -> None:
    """Read the answers of these calls, of one kind of backend, if they all come within that time.

    It is one request for all of them, where the backend has such a thing.
    """
    pending = [each for future in futures for each in future.pending]
    answers = futures[0].transport.fetch_all(pending, seconds)
    if answers is None:
        for future in futures:
            future.is_late = True
        return
    headers, payloads = iter(answers[0]), iter(answers[1])
    for future in futures:
        size = len(future.pending)
        future.accept(list(islice(headers, size)), list(islice(payloads, size)))


def watch_together(
    futures: Sequence[WorkerFuture], timeout: float | None = None, since: float | None = None
) -> Iterator[int]:
    """Wait for calls on one transport; gives the place of each once its answers are here.

    A failure is given as soon as it is known, and so are the calls that have ended by then. While
    all goes well, payloads are read at the end, by one request where a backend has that.
    """
    waits = [
        CallWait(
            future._calls,
            timeout,
            since=since,
            rows=future.rows,
            gives_up_soon=future.gives_up_soon,
        )
        for future in futures
    ]
    has_failed, unread = False, []
    for place in wait_for_calls(waits):
        futures[place]._waited = outcome = waits[place].outcome
        if isinstance(outcome, BaseException):
            has_failed = True
            yield place
        else:
            unread.append(place)
        if has_failed:
            _read_payloads([futures[place] for place in unread])
            yield from unread
            unread = []
    _read_payloads([futures[place] for place in unread])
    yield from unread


def _read_payloads(futures: Sequence[WorkerFuture]) -> None:
    """Bring what these calls on one transport have returned, whose headers are there.

    What does not come is left to the future that it belongs to: it says whose it is.
    """
    if not futures:
        return
    pending = [each for future in futures for each in future.pending]
    with suppress(WorkerError):
        payloads = iter(futures[0].transport.fetch_payloads(pending))
        for future in futures:
            future.take_payloads(payloads)


class DataProtoFuture(WorkerFuture):
    """The future of a `DataProto`; `get()` gives a `Result` where the method returns metrics, too.

    Passed to a group that has as many data-parallel ranks, its chunks go from worker to worker as
    the batch: nothing is fetched here.
    """


class _GivenUpError(WaitTimeoutError):
    """A call that was not waited for to its end, since another one had failed."""


def gather(*futures: Any, timeout: float | None = None, grace_s: float | None = None) -> list[Any]:
    """The results of all the futures, in order.

    All are waited for (together `timeout` seconds), even when one fails; with `grace_s` no longer
    than that after it, and a second after a death: calls of two groups that wait for each other. A
    failure is logged as soon as it is there. In the end the first in order is raised, a death
    before others; the other ones are in its attribute `others` and in its notes.
    """
    outcomes = _outcomes(futures, timeout, grace_s)
    errors = [error for _, error in outcomes if error is not None]
    errors.sort(key=_says_less)
    if not errors:
        return [value for value, _ in outcomes]
    first, *others = errors
    first.others = others  # type: ignore[attr-defined]
    note_some(first, [f"also failed: {type(other).__name__}: {other}" for other in others])
    raise first


def _says_less(error: Exception) -> int:
    """By how much an error explains less than others: a death explains them."""
    return 0 if isinstance(error, WorkerDiedError) else 1 + isinstance(error, _GivenUpError)


def _outcomes(
    futures: Sequence[Any], timeout: float | None, grace_s: float | None
) -> list[Outcome]:
    """The value or the error of every future, in order."""
    arrived: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()

    def watch(position: int) -> None:
        arrived.put((position, _outcome_of(futures[position], timeout)))

    def watch_calls(positions: Sequence[int]) -> None:
        left = list(positions)
        try:
            for place in watch_together([futures[position] for position in positions], timeout):
                left.remove(positions[place])
                watch(positions[place])
        except Exception:  # noqa: BLE001 - `get` raises it for each that is left
            logger.debug("the watch over %s calls ended", len(positions), exc_info=True)
        for position in left:
            watch(position)

    if timeout is None:
        _read_soon(futures)
    work: list[Callable[[], None]] = []
    by_transport: dict[int, list[int]] = defaultdict(list)
    for position, future in enumerate(futures):
        if len(futures) == 1 or (isinstance(future, WorkerFuture) and future.has_answers):
            watch(position)
        elif isinstance(future, WorkerFuture):
            by_transport[id(future.transport)].append(position)
        else:
            work.append(functools.partial(watch, position))
    work += [functools.partial(watch_calls, positions) for positions in by_transport.values()]
    for each in work:
        threading.Thread(target=each, name="gather", daemon=True).start()

    outcomes: dict[int, Outcome] = {}
    until: float | None = None
    while len(outcomes) < len(futures):
        try:
            position, outcome = arrived.get(timeout=until and max(0.0, until - time.monotonic()))
        except queue.Empty:
            for n, future in enumerate(futures):
                given_up = _GivenUpError(f"{future}: not finished {grace_s:g} s after the failure")
                outcomes.setdefault(n, (None, given_up))
            break
        outcomes[position] = outcome
        error = outcome[1]
        if error is not None and len(outcomes) < len(futures):
            if grace_s is not None and isinstance(error, WorkerDiedError):
                grace_s, until = min(grace_s, AFTER_DEATH_S), None
            until = until or (None if grace_s is None else time.monotonic() + grace_s)
            left = few([str(future) for n, future in enumerate(futures) if n not in outcomes])
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            said = said.rstrip(".")  # the whole of it is raised
            logger.error("%s failed: %s. Waiting for %s.", futures[position], said, left)
    return [outcomes[position] for position in range(len(futures))]


def _read_soon(futures: Sequence[Any]) -> None:
    """Read the answers of workers together, of those that nobody has waited for."""
    unread: dict[str, list[WorkerFuture]] = defaultdict(list)
    for future in futures:
        if isinstance(future, WorkerFuture) and not (future.has_answers or future.is_late):
            unread[future.transport.kind].append(future)
    for alike in unread.values():
        if len(alike) > 1:
            read_together(alike, SOON_S)


def _outcome_of(future: Any, timeout: float | None) -> Outcome:
    try:
        return future.get(timeout), None
    except Exception as error:  # noqa: BLE001 - it is raised by `gather`, with every other one
        return None, error
