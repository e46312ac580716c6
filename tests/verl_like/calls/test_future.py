"""`gather`: everything is waited for, and a failure is logged at once."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from verl_like import gather
from verl_like.errors import WorkerDiedError


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


def test_a_failure_is_logged_while_an_earlier_future_is_still_on_its_way() -> None:
    logged = threading.Event()
    handler = Releasing(logged)
    logging.getLogger("verl_like.calls.future").addHandler(handler)
    try:
        with pytest.raises(KeyError, match="second"):
            gather(
                Later("first", logged), Later(KeyError("second"))
            )  # the first comes only once the log has the failure
    finally:
        logging.getLogger("verl_like.calls.future").removeHandler(handler)
    assert logged.is_set()


def test_values_come_in_the_order_of_the_futures_and_none_is_none() -> None:
    event = threading.Event()
    slow = Later(1, event)
    threading.Timer(0.05, event.set).start()
    assert gather(slow, Later(2), Later(3)) == [1, 2, 3]
    assert gather(Later(4)) == [4]
    assert gather() == []


def test_one_timeout_covers_all() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match="too late") as caught:
        gather(Later(1, never), Later(2, never), timeout=0.05)
    assert [str(other) for other in caught.value.others] == ["too late"]


def test_with_grace_the_others_are_waited_for_no_longer_than_that_after_a_failure() -> None:
    never = threading.Event()
    with pytest.raises(KeyError, match="left the collective") as caught:
        gather(Later("receiver", never), Later(KeyError("left the collective")), grace_s=0.05)
    assert "not finished 0.05 s after the failure" in str(caught.value.others[0])


def test_with_grace_all_that_end_in_time_give_what_they_have() -> None:
    event = threading.Event()
    threading.Timer(0.05, event.set).start()
    assert gather(Later(1, event), Later(2), grace_s=0.01) == [1, 2]


def test_of_several_failures_a_death_is_raised_for_it_explains_the_others() -> None:
    lost, broken = WorkerDiedError("rollout rank 0 is gone"), KeyError("nothing came")
    with pytest.raises(WorkerDiedError) as caught:
        gather(Later(broken), Later(lost))
    assert caught.value.others == [broken]
