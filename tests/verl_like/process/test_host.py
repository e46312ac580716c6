"""The host of roles handles calls; no process is started."""

from __future__ import annotations

import asyncio
import io
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from verl_like import masking
from verl_like.calls.dispatch import Dispatch, register
from verl_like.calls.messages import Call, Header, RemoteError
from verl_like.errors import WorkerError
from verl_like.process.host import RotatingLog, WorkerHost, pack_constructors
from verl_like.process.info import ProcessInfo
from verl_like.process.worker import Worker
from verl_like.registry import load_object


class Late(Worker):
    """Returns a moment later."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    async def later(self, value: int) -> int:
        await asyncio.sleep(0.01)
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def say(self, text: str) -> None:
        print(text)


def test_a_header_survives_packing():
    plain = Header("actor", "update", 3, 77, 1.5, 2.5, 0.25)
    failed = plain._replace(
        rows=8,
        keys=("ids", "mask"),
        error=RemoteError(b"x", "T", "t"),
        mesh_layout={"actor": {"dp": (3, True)}},
        metrics={"loss": [0.5, 1], "name": "adam"},
        only_padding=True,
        returned="batch",
    )
    for header in (plain, failed):
        assert Header.read(header.packed()) == header
        assert Header.read(header) is header


def started(
    roles: list[str], facts: ProcessInfo, monkeypatch, worker: type[Worker] = Late
) -> WorkerHost:
    """Return a host that leaves this process's environment unchanged."""
    monkeypatch.setattr(WorkerHost, "_set_up_process", lambda *_: None)
    host = WorkerHost({role: (worker, (), {}) for role in roles}, facts)
    assert host.start(("127.0.0.1", 1)).error is None
    return host


def test_concurrent_coroutines_share_one_event_loop(monkeypatch):
    host = started(["late"], ProcessInfo("late", 0, 1, 0), monkeypatch)
    loops: list[Any] = []
    new_event_loop = asyncio.new_event_loop

    def slow_loop():
        time.sleep(0.05)
        loops.append(new_event_loop())
        return loops[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", slow_loop)
    calls = [Call("late", "later", (number,), concurrent=True) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda call: host.call(call, ())[0], calls))
    assert results == [0, 1, 2, 3]
    assert len(loops) == 1
    host.close()


@dataclass
class Judge:
    """A section of a configuration."""

    api_key: str = "sk-only-in-the-configuration"


@dataclass
class Rewarded:
    """A configuration."""

    judges: list[Judge] = field(default_factory=lambda: [Judge()])


class Talkative(Worker):
    """Returns its arguments."""

    def __init__(self, config: Rewarded) -> None:
        print(config.judges[0].api_key)


def test_a_secret_of_the_configuration_is_masked_in_a_workers_log(tmp_path, monkeypatch):
    known: set[str] = set()
    monkeypatch.setattr(masking, "_known", lambda: known)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(WorkerHost, "_set_up_process", lambda *_: None)
    facts = ProcessInfo("talkative", log_dir=str(tmp_path))
    host = WorkerHost({"talkative": (Talkative, (Rewarded(),), {})}, facts)
    assert host.start(("127.0.0.1", 1)).error is None
    host.close()
    assert (tmp_path / "talkative-0.log").read_text() == f"{masking.MASK}\n"


def test_prints_of_two_roles_go_to_separate_logs(tmp_path, monkeypatch):
    for stream in ("stdout", "stderr"):  # the host replaces them, as in a worker process
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    host = started(
        ["one", "two"], ProcessInfo("one+two", 0, 1, 0, log_dir=str(tmp_path)), monkeypatch
    )
    try:
        for role, text in (("one", "a"), ("one", "b"), ("two", "c"), ("one", "d")):
            assert host.call(Call(role, "say", (text,)), ())[1].error is None
    finally:
        host.close()
    logs = {role: (tmp_path / f"{role}-0.log").read_text().split() for role in ("one", "two")}
    assert logs == {"one": ["a", "b", "d"], "two": ["c"]}


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "é"), ("ascii", "\\xe9")])
def test_a_role_may_print_characters_that_cannot_be_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str
) -> None:
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, console)
    host = started(["one"], ProcessInfo("one", 0, 1, 0, log_dir=str(tmp_path)), monkeypatch)
    try:
        assert host.call(Call("one", "say", ("a \ud800 é",)), ())[1].error is None
    finally:
        host.close()
    console.flush()
    assert console.buffer.getvalue().decode() == f"a \\ud800 {shown}\n"
    assert (tmp_path / "one-0.log").read_text(encoding="utf-8") == "a \\ud800 é\n"


def test_a_full_log_is_rotated_and_the_last_one_stays(tmp_path, monkeypatch):
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


def test_stacks_show_only_the_running_call(monkeypatch):
    host = started(["late"], ProcessInfo("late", 0, 1, 0), monkeypatch)
    assert host.stacks() == "idle: no call is running"
    entered, leave = threading.Event(), threading.Event()

    def stay_here(*_):
        entered.set()
        leave.wait(30)

    monkeypatch.setattr(Late, "say", stay_here)
    running = threading.Thread(target=host.call, args=(Call("late", "say"), ()), name="runs")
    running.start()
    assert entered.wait(30)
    shown = host.stacks()
    leave.set()
    running.join(10)
    assert shown.startswith("thread runs:")
    assert "in stay_here" in shown
    assert "in the_stacks" not in shown
    host.close()


class Unshowable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise TypeError("no text")


class Raises(Worker):
    """Raises its argument, in every kind of call."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def in_turn(self, error: BaseException) -> None:
        raise error

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def as_coroutine(self, error: BaseException) -> None:
        raise error

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def concurrent(self, error: BaseException) -> None:
        raise error


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerHost]:
    """A host of one role that raises, as in its own process."""
    host = started(["raises"], ProcessInfo("role", 0, 1, 0), monkeypatch, Raises)
    yield host
    host.close()


@pytest.mark.parametrize(
    ("method", "concurrent"), [("in_turn", False), ("as_coroutine", False), ("concurrent", True)]
)
@pytest.mark.parametrize(
    "raised", [GeneratorExit, KeyboardInterrupt, SystemExit, BaseException, Unshowable]
)
def test_unusual_exceptions_reach_the_driver_as_worker_errors(
    method: str, concurrent: bool, raised: type[BaseException], raising: WorkerHost
) -> None:
    call = Call("raises", method, (raised("why"),), concurrent=concurrent)
    with ThreadPoolExecutor(1) as thread:  # as for concurrent calls
        _, header = thread.submit(raising.call, call, ()).result(10)
    assert header.error is not None
    error = header.error.rebuild("raises.here, rank 0")
    assert isinstance(error, WorkerError)
    assert f"raises.here, rank 0 raised {raised.__module__}.{raised.__name__}" in str(error)
    assert f"in {method}" in error.__notes__[0]
    assert "why" in error.__notes__[0] or raised is Unshowable


def test_sys_exit_in_the_main_thread_ends_the_process(raising: WorkerHost) -> None:
    with pytest.raises(SystemExit):
        raising.call(Call("raises", "in_turn", (SystemExit(3),)), ())


def test_only_ctrl_c_passes_through_an_inline_call() -> None:
    host = WorkerHost({"raises": (Raises, (), {})}, ProcessInfo("raises", 0, 1, 0), {})
    assert host.start(None).error is None
    with pytest.raises(KeyboardInterrupt):
        host.call(Call("raises", "in_turn", (KeyboardInterrupt(),)), ())
    assert host.call(Call("raises", "in_turn", (SystemExit(),)), ())[1].error is not None


def test_a_class_from_a_file_is_pickled_without_its_module(tmp_path, monkeypatch):
    (tmp_path / "of_file.py").write_text(
        "class Own:\n    def __init__(self, n):\n        self.n = n"
    )
    own = load_object(f"{tmp_path}/of_file.py:Own", "role_workers.own")
    packed = pack_constructors({"own": (own, (3,), {}), "late": (Late, (), {})})
    monkeypatch.delitem(sys.modules, own.__module__)
    constructors = pickle.loads(packed)
    cls, arguments, _ = constructors["own"]
    assert cls(*arguments).n == 3
    assert constructors["late"][0] is Late, "a class that can be imported is pickled by name"
