"""Answers of untrusted code are read as lines of JSON, whatever it writes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from threading import Thread

import pytest

from verl_like.process import pool
from verl_like.process.pool import Process, ProcessFailure, ProcessPool, UserEnd

Ends = tuple[ProcessPool, Process, UserEnd]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    pool, end = ProcessPool(), UserEnd(theirs.detach())
    yield pool, pool.add(Process(ours)), end
    pool.close()
    end.close()


def test_answers_before_garbage_are_received(ends: Ends) -> None:
    pool, process, end = ends
    pool.send(process, {7: "a", 8: "b"}, 1.0)
    assert end.receive() == [(0, "a"), (1, "b")]
    end.send(0, 1.5)
    end._socket.sendall(b"]]]\n")
    first, second = pool.answers(1.0)
    assert first == (process, 7, 1.5)
    assert second[2] == ProcessFailure("sent an invalid reply: b']]]'")
    assert not pool.processes


def test_only_the_first_answer_to_a_message_counts(ends: Ends) -> None:
    pool, process, end = ends
    pool.send(process, {7: "a"}, 5.0)
    for line in (b"{}", b"5", b"[1, 2, 3]", b"[[0], 1]", b"[1, 2]", b"[0, 3]", b"[0, 4]"):
        end._socket.sendall(line + b"\n")
    assert list(pool.answers(1.0)) == [(process, 7, 3)]
    assert not list(pool.answers(1.0))


def test_the_length_of_an_answer_is_limited(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    pool_, process, end = ends
    monkeypatch.setattr(pool, "LONGEST_ANSWER", 2**20)
    pool_.send(process, {7: "a"}, 5.0)
    end._socket.setblocking(False)
    words = []
    while not words:
        end._socket.send(b"1" * 2**16)
        words = [answer.words for _, _, answer in pool_.answers(1.0)]
    assert words == ["sent an answer of more than 1 MiB"]


def test_messages_larger_than_a_buffer_do_not_block_the_driver(ends: Ends) -> None:
    pool, process, end = ends
    pool.send(process, {7: "a" * 2**20, 8: "b"}, 30.0)
    Thread(target=lambda: [end.send(number, len(x)) for number, x in end.receive()]).start()
    lengths: list[int] = []
    while len(lengths) < 2:
        lengths += [answer for _, _, answer in pool.answers(1.0)]
    assert lengths == [2**20, 1]


def test_a_message_that_is_not_read_is_late(ends: Ends) -> None:
    pool, process, _ = ends
    pool.send(process, {7: "a" * 2**20}, 0.05)
    ((_, _, answer),) = pool.answers(1.0)
    assert answer == ProcessFailure("did not answer", is_late=True)
