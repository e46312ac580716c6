"""`gather` waits for everything, and logs a failure at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from verl_like import gather
from verl_like.calls.deadlines import Deadlines
from verl_like.calls.future import WorkerFuture
from verl_like.calls.messages import Header, Pending, RemoteError
from verl_like.calls.transport import Transport
from verl_like.errors import WorkerDiedError
from verl_like.process.info import ProcessInfo


class Later:
    """A result that comes when its event is set."""

    def __init__(self, value: Any, event: threading.Event | None = None):
        self.value, self.event = value, event

    def get(self, timeout: float | None = None) -> Any:
        if self.event is not None and not self.event.wait(10 if timeout is None else timeout):
            raise TimeoutError("too late")
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Releasing(logging.Handler):
    """Sets an event when the first record comes."""

    def __init__(self, event: threading.Event):
        super().__init__()
        self.event = event

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


@pytest.fixture
def logged() -> Iterator[threading.Event]:
    """An event that is set once a failure is logged."""
    event, logger = threading.Event(), logging.getLogger("verl_like.calls.future")
    handler = Releasing(event)
    logger.addHandler(handler)
    yield event
    logger.removeHandler(handler)


def test_a_failure_is_logged_while_an_earlier_future_is_pending(logged: threading.Event) -> None:
    with pytest.raises(KeyError, match="second"):
        gather(Later("first", logged), Later(KeyError("second")))
    assert logged.is_set()


def test_one_timeout_covers_all_futures() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match="too late") as caught:
        gather(Later(1, never), Later(2, never), timeout=0.05)
    assert [str(other) for other in caught.value.others] == ["too late"]


def test_after_a_failure_gather_waits_only_for_the_grace_period() -> None:
    never = threading.Event()
    with pytest.raises(KeyError, match="left the collective") as caught:
        gather(Later("receiver", never), Later(KeyError("left the collective")), grace_s=0.05)
    assert "not finished 0.05 s after the failure" in str(caught.value.others[0])


def test_after_a_death_gather_waits_at_most_a_second() -> None:
    never, lost = threading.Event(), WorkerDiedError("rollout rank 0 is gone")
    with pytest.raises(WorkerDiedError) as caught:
        gather(Later("sender", never), Later(lost), grace_s=9.0)
    assert "not finished 1 s after the failure" in str(caught.value.others[0])


def test_the_grace_period_starts_only_at_a_failure() -> None:
    event = threading.Event()
    threading.Timer(0.05, event.set).start()
    assert gather(Later(1, event), Later(2), grace_s=0.01) == [1, 2]


def test_gather_raises_a_death_before_other_failures() -> None:
    lost, broken = WorkerDiedError("rollout rank 0 is gone"), KeyError("nothing came")
    with pytest.raises(WorkerDiedError) as caught:
        gather(Later(broken), Later(lost))
    assert caught.value.others == [broken]


class Store(Transport):
    """A backend that has some results, and reads them in one request."""

    kind = "store"
    submit = stacks = shutdown = construct_again = None

    def __init__(self, headers: dict[str, Header]) -> None:
        super().__init__([ProcessInfo()], Deadlines())
        self.headers, self.requests, self.threads = headers, [], []
        self.pending: dict[str, threading.Event] = {}
        """Results that arrive when their event is set."""

    def fetch_together(self, references: Sequence[Any], seconds: float) -> Any:
        self.requests.append(list(references))
        if any(reference not in self.headers for reference in references):
            return None
        return [self.fetch(reference) for reference in references]

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        self.threads.append(threading.current_thread().name)
        for reference in set(references).intersection(self.pending):
            self.pending[reference].wait(0.01)
        return [r for r in references if r not in self.pending or self.pending[r].is_set()]

    def fetch(self, reference: Any) -> Any:
        return self.headers.get(reference, header()).packed(), reference

    def place(self, rank: int) -> str:
        return "nowhere"

    def call(self, name: str) -> WorkerFuture:
        pending = [Pending(0, name, name, "role")]
        return WorkerFuture(name, self, pending, lambda _, payloads: payloads, pending)


def header(error: RemoteError | None = None) -> Header:
    return Header("role", "method", 0, 1, 0.0, 1.0, 0.5, error=error)


def test_results_of_quick_calls_are_read_by_one_request() -> None:
    store = Store({"first": header(), "second": header()})
    assert gather(store.call("first"), Later("other"), store.call("second")) == [
        ["first"],
        "other",
        ["second"],
    ]
    assert store.requests == [["first", "second"]]
    assert not store.threads, "nobody waited for a call by itself"
    assert len(store.take_finished()) == 2


def test_a_failure_is_raised_after_the_other_results_are_read() -> None:
    store = Store({"first": header(), "bad": header(RemoteError.of(KeyError("of the worker")))})
    good = store.call("first")
    with pytest.raises(KeyError, match="of the worker"):
        gather(good, store.call("bad"))
    assert store.requests == [["first", "bad"]]
    assert good.get() == ["first"]


def test_one_thread_per_backend_watches_slow_calls() -> None:
    store = Store({"first": header()})
    assert gather(store.call("first"), store.call("late")) == [["first"], ["late"]]
    assert store.requests[0] == ["first", "late"]
    assert store.threads == ["gather"]


def test_a_failure_is_logged_while_a_call_on_the_same_pool_is_pending(
    logged: threading.Event,
) -> None:
    store = Store({"bad": header(RemoteError.of(KeyError("of the worker")))})
    store.pending["late"] = logged
    late = store.call("late")
    with pytest.raises(KeyError, match="of the worker"):
        gather(late, store.call("bad"))
    assert logged.is_set()
    assert late.get() == ["late"]


def test_a_call_that_failed_before_its_last_answer_can_be_gathered_again() -> None:
    store = Store({"bad": header(RemoteError.of(KeyError("of the worker")))})
    store.pending["late"], store.deadlines = threading.Event(), Deadlines(grace_s=0.01)
    pending = [Pending(0, name, name, "role") for name in ("bad", "late")]
    call = WorkerFuture("call", store, pending, lambda _, payloads: payloads)
    for _ in range(2):
        with pytest.raises(KeyError, match="of the worker") as caught:
            gather(call)
    assert sum("not finished 0 s after the failure" in n for n in caught.value.__notes__) == 1


def test_a_result_that_cannot_be_fetched_is_the_error_of_its_call() -> None:
    class Lossy(Store):
        def fetch(self, reference: Any) -> Any:
            if reference == "lost":
                raise WorkerDiedError("the machine that stored the result is gone")
            return super().fetch(reference)

    store = Lossy({})
    lost, good = store.call("lost"), store.call("good")
    with pytest.raises(WorkerDiedError, match=r"^lost, role rank 0 .*the machine that stored"):
        gather(good, lost)
    assert good.get() == ["good"]


def test_late_calls_of_one_pool_read_its_stacks_once() -> None:
    class Hanging(Store):
        num_reads = 0

        def stacks(self, seconds: float) -> dict[int, str]:
            self.num_reads += 1
            return {0: "idle: no call is running"}

    store = Hanging({})
    store.pending = {name: threading.Event() for name in "abc"}
    with pytest.raises(TimeoutError, match=r"^a: role rank 0 of 1 \(nowhere\) did not finish"):
        gather(*map(store.call, "abc"), timeout=0.05)
    assert store.num_reads == 1


def test_an_error_of_the_watching_thread_fails_every_pending_call() -> None:
    class Broken(Store):
        def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
            raise OSError("no connection")

    store = Broken({})
    with pytest.raises(OSError, match="no connection") as caught:
        gather(store.call("a"), store.call("b"))
    assert [str(other) for other in caught.value.others] == ["no connection"]


def test_gather_shows_the_first_failures_and_counts_the_others() -> None:
    failing = [Later(KeyError(number)) for number in range(300)]
    with pytest.raises(KeyError, match="0") as caught:
        gather(*failing)
    assert len(caught.value.others) == 299
    first, *_, eighth, last = caught.value.__notes__
    assert (first, eighth) == ("also failed: KeyError: 1", "also failed: KeyError: 8")
    assert last == "and 291 more failures"


def test_gather_shows_equal_failures_once() -> None:
    with pytest.raises(KeyError) as caught:
        gather(*(Later(KeyError(number)) for number in (1, 1, 2, 2)))
    assert caught.value.__notes__ == ["also failed: KeyError: 2"]
