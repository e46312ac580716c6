"""What a worker process does with a call, without a process."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

from verl_like.calls.dispatch import Dispatch, register
from verl_like.calls.messages import Call, Header, RemoteError
from verl_like.process.facts import ProcessFacts
from verl_like.process.host import WorkerHost
from verl_like.process.role_state import RotatingLog
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


def started(roles: list[str], facts: ProcessFacts, monkeypatch) -> WorkerHost:
    """A host that thinks it has a process of its own, and leaves this one's environment alone."""
    monkeypatch.setattr(WorkerHost, "_own_the_process", lambda *_: None)
    host = WorkerHost({role: (Late, (), {}) for role in roles}, facts)
    assert host.start(("127.0.0.1", 1)).error is None
    return host


def test_two_coroutines_past_the_queue_share_one_loop(monkeypatch):
    host = started(["late"], ProcessFacts("late", 0, 1, 0), monkeypatch)
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
        ["one", "two"], ProcessFacts("one+two", 0, 1, 0, log_dir=str(tmp_path)), monkeypatch
    )
    try:
        for role, text in (("one", "a"), ("one", "b"), ("two", "c"), ("one", "d")):
            assert host.call(Call(role, "say", (text,)), ())[1].error is None
    finally:
        host.close()
    logs = {role: (tmp_path / f"{role}-0.log").read_text().split() for role in ("one", "two")}
    assert logs == {"one": ["a", "b", "d"], "two": ["c"]}


def test_a_full_log_begins_anew_in_its_place_and_the_one_before_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(RotatingLog, "LIMIT", 10)
    path = tmp_path / "one-0.log"
    path.write_text("before\n")
    log = RotatingLog(path)
    with path.open("a") as crash_log:
        for number in range(5):
            log.write(f"line {number}\n")
        crash_log.write("crash\n")
    log.close()
    assert path.read_text() == "line 3\nline 4\ncrash\n"
    assert (tmp_path / "one-0.log.1").read_text() == "line 1\nline 2\n"
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "one-0.log.1"]


def test_the_stacks_of_a_process_show_the_call_that_runs_and_nothing_else(monkeypatch):
    host = started(["late"], ProcessFacts("late", 0, 1, 0), monkeypatch)
    assert host.stacks() == "idle: no call is running"
    entered, leave = threading.Event(), threading.Event()

    def stay_here(*_):
        entered.set()
        leave.wait(10)

    monkeypatch.setattr(Late, "say", stay_here)
    running = threading.Thread(target=host.call, args=(Call("late", "say"), ()), name="runs")
    running.start()
    assert entered.wait(10)
    shown = host.stacks()
    leave.set()
    running.join(10)
    assert shown.startswith("thread runs:")
    assert "in stay_here" in shown
    assert "in the_stacks" not in shown
    host.close()
