"""Output of untrusted code is read as lines of JSON, whatever it writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing import Pipe

import pytest

from workers.rewards import channel
from workers.rewards.channel import DriverEnd, FunctionEnd, NoAnswerError

Ends = tuple[DriverEnd, FunctionEnd]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = Pipe()
    driver, function = DriverEnd(ours), FunctionEnd(theirs.fileno())
    yield driver, function
    driver.close()
    function._incoming.close()
    function._socket.detach()
    theirs.close()


def soon() -> float:
    return time.monotonic() + 0.05


def test_replies_before_garbage_are_received(ends: Ends) -> None:
    driver, function = ends
    function.send([0, [1.0, {}, None]])
    function._socket.sendall(b"]]]\n")
    assert driver.receive(soon()) == [0, [1.0, {}, None]]
    with pytest.raises(NoAnswerError, match="sent an invalid reply"):
        driver.receive(soon())


def test_the_end_of_a_process_is_an_error(ends: Ends) -> None:
    driver, function = ends
    function.send({"ended": "ended with exit code 3"})
    with pytest.raises(NoAnswerError, match="^ended with exit code 3$"):
        driver.receive(soon())


def test_the_length_of_a_reply_is_limited(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, function = ends
    monkeypatch.setattr(channel, "LONGEST_ANSWER", 100)
    function._socket.sendall(b"1" * 101)
    with pytest.raises(NoAnswerError, match="more than 100 bytes"):
        driver.receive(soon())
