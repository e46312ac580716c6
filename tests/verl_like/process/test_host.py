"""What a worker process does with a call, without a process."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

from verl_like.calls.dispatch import Dispatch, register
from verl_like.calls.transport import Call, Header, RemoteError
from verl_like.process.host import HostFacts, WorkerHost
from verl_like.process.worker import Worker


class Late(Worker):
    """Answers a moment later."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    async def later(self, value: int) -> int:
        await asyncio.sleep(0.01)
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def say(self, text: str) -> None:
        print(text)


def test_a_header_arrives_as_it_was_packed():
    facts = {"actor": {"dp": (3, True)}}
    plain = Header("actor", "update", 3, 77, 1.5, 2.5, 0.25)
    failed = Header(
        "actor",
        "update",
        3,
        77,
        1.5,
        2.5,
        0.25,
        8,
        ("ids", "mask"),
        RemoteError(b"x", "T", "t"),
        facts,
        {"loss": [0.5, 1], "name": "adam"},
        True,
    )
    for header in (plain, failed):
        assert Header.read(header.packed()) == header
        assert Header.read(header) is header


def started(roles: list[str], facts: HostFacts, monkeypatch) -> WorkerHost:
    """A host that thinks it has a process of its own, and leaves this one's environment alone."""
    monkeypatch.setattr(WorkerHost, "_own_the_process", lambda *_: None)
    host = WorkerHost({role: (Late, (), {}) for role in roles}, facts)
    assert host.start(("127.0.0.1", 1)).error is None
    return host


def test_two_coroutines_past_the_queue_share_one_loop(monkeypatch):
    host = started(["late"], HostFacts("late", 0, 1, 0), monkeypatch)
    made: list[Any] = []
    new_event_loop = asyncio.new_event_loop

    def slow_loop():
        time.sleep(0.05)
        made.append(new_event_loop())
        return made[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", slow_loop)
    answers: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda i=i: answers.append(
                host.call(Call("late", "later", (i,), past_queue=True), ())
            )
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(value for value, _ in answers) == [0, 1, 2, 3]
    assert len(made) == 1
    host.close()


def test_what_two_roles_of_a_process_print_goes_to_the_log_of_each(tmp_path, monkeypatch):
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(
            sys, stream, getattr(sys, stream)
        )  # a process of its own keeps what the host puts there
    host = started(
        ["one", "two"], HostFacts("one+two", 0, 1, 0, log_dir=str(tmp_path)), monkeypatch
    )
    try:
        for role, text in (("one", "a"), ("one", "b"), ("two", "c"), ("one", "d")):
            assert host.call(Call(role, "say", (text,), silent=True), ())[1].error is None
    finally:
        host.close()
    logs = {role: (tmp_path / f"{role}-0.log").read_text().split() for role in ("one", "two")}
    assert logs == {"one": ["a", "b", "d"], "two": ["c"]}
