"""Answers that wake nobody lie in a buffer, whatever a stranger makes of it."""

from __future__ import annotations

import math
import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterator

import pytest

from workers.rewards.channel import BUFFER_BYTES, DriverEnd, FunctionEnd, NoAnswerError

Ends = tuple[DriverEnd, FunctionEnd, int]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends, with a first message on its way, and the file of the buffer."""
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as file, theirs:
        file.truncate(BUFFER_BYTES)
        driver = DriverEnd(ours, os.dup(file.fileno()))
        function = FunctionEnd(theirs, file.fileno())
        driver.send("first", soon())
        yield driver, function, file.fileno()
        driver.close()
        function._incoming.close()


def soon() -> float:
    return time.monotonic() + 0.05


def test_what_is_put_wakes_nobody_and_is_read_once(ends: Ends) -> None:
    driver, function, _ = ends
    assert function.receive() == "first"
    for number in range(3):
        function.put(number, (None, {}, "a\nb\u2028"))
    with pytest.raises(TimeoutError):
        driver.receive(soon())
    assert list(driver.buffered()) == [[number, [None, {}, "a\nb\u2028"]] for number in range(3)]
    assert list(driver.buffered()) == []
    function.put(3, (0.1, {}, None))
    assert list(driver.buffered()) == [[3, [0.1, {}, None]]]


def test_more_than_is_usual_is_read_whole_and_what_has_no_room_comes_over_the_socket(
    ends: Ends,
) -> None:
    driver, function, _ = ends
    function.receive()
    extras = {"pred": "x" * 10_000}
    for number in range(8):
        function.put(number, (1.0, extras, None))
    over_socket = [driver.receive(soon()), driver.receive(soon())]
    answers = [*driver.buffered(), *over_socket]
    assert answers == [[number, [1.0, extras, None]] for number in range(8)]


def test_answers_to_an_earlier_message_are_not_read_again(ends: Ends) -> None:
    driver, function, _ = ends
    function.receive()
    function.put(0, (1.0, {}, None))
    assert list(driver.buffered()) == [[0, [1.0, {}, None]]]
    driver.send("second", soon())
    assert list(driver.buffered()) == []
    assert function.receive() == "second"
    function.put(0, (2.0, {}, None))
    assert list(driver.buffered()) == [[0, [2.0, {}, None]]]


def test_what_was_put_before_garbage_counts(ends: Ends) -> None:
    driver, function, file = ends
    function.receive()
    function.put(0, (1.0, {}, None))
    function.put(1, (1.0, {}, None))
    content = os.pread(file, BUFFER_BYTES, 0)
    os.pwrite(file, b"]" * 6, content.index(b"[1,"))
    found = iter(driver.buffered())
    assert next(found) == [0, [1.0, {}, None]]
    with pytest.raises(NoAnswerError, match="what is no answer"):
        next(found)


@pytest.mark.parametrize("when", [math.nan, math.inf, -math.inf, -1.0])
def test_no_time_that_it_gives_puts_off_a_deadline(ends: Ends, when: float) -> None:
    driver, function, file = ends
    function.receive()
    function.put(0, (1.0, {}, None))
    asked_at = driver.last_answer
    os.pwrite(file, struct.pack("!d", when), 16)
    assert list(driver.buffered()) == [[0, [1.0, {}, None]]]
    assert asked_at <= driver.last_answer <= time.monotonic()


@pytest.mark.parametrize("size", [0, 10, 24])
def test_a_file_that_was_made_shorter_holds_nothing(ends: Ends, size: int) -> None:
    driver, function, file = ends
    function.receive()
    function.put(0, (None, {}, "a long answer"))
    os.ftruncate(file, size)
    assert list(driver.buffered()) == []
