"""A reward function is untrusted: its failures are reported, cost a sample, and leave nothing."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.forked import start_python
from tests.waiting import is_running, wait_until, wait_until_ended
from verl_like.errors import ConfigError
from verl_like.process import child
from verl_like.process.family import descendants
from verl_like.process.sandbox import Sandbox
from verl_like.process.supervisor import MAX_OUTPUT
from workers.rewards.outcome import LATE
from workers.rewards.scorer import FunctionSpec, Scorer

pytestmark = pytest.mark.linux

UNTRUSTED = """
import asyncio, ctypes, fcntl, os, signal, socket, subprocess, sys, time
from pathlib import Path

def every_socket():
    for number in range(3, 64):
        try:
            socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        yield number

RESULTS = {
    "huge": lambda: 1e308,
    "memory": lambda: len(bytearray(2**31)),
    "disk": lambda: Path("big").write_bytes(bytes(2**21)),
    "open": lambda: len([open(os.devnull) for _ in range(2000)]),
    "secret": lambda: float(os.environ["SECRET_OF_TEST"]),
    "group": lambda: os.getpgid(0),
}
EFFECTS = {
    "exit": lambda: sys.exit(3),
    "_exit": lambda: os._exit(4),
    "crash": lambda: ctypes.string_at(0),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped supervisor": lambda: os.kill(os.getppid(), signal.SIGSTOP),
    "print": lambda: sys.stdout.write("x" * 3 * 2**20),
}

class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no words")

def act(solution_str):
    if solution_str == "fork, and go on in both":
        if os.fork() == 0:
            time.sleep(0.2)
            return 7.0
        return 2.0
    if solution_str in RESULTS:
        return RESULTS[solution_str]()
    if solution_str in EFFECTS:
        EFFECTS[solution_str]()
    if solution_str in ("supervisor", "supervisor, and stays"):
        Path(NOTE).write_text(f"{os.getpid()} {os.getcwd()}")
        if "stays" in solution_str:
            ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if solution_str in ("not an answer\\n", "[0, ["):
        for number in every_socket():
            os.write(number, solution_str.encode())
        time.sleep(60)
    if solution_str == "cpu":
        while True:
            pass
    if solution_str == "many files":
        for number in range(300):
            Path(f"{number}").touch()
        time.sleep(60)
    if solution_str == "unspeakable":
        raise Odd
    if solution_str == "fork":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(NOTE).write_text(str(os.getpid()))
                time.sleep(60)
            os._exit(0)
        time.sleep(60)
    if solution_str == "bomb":
        lock = open(NOTE, "w")
        fcntl.flock(lock, fcntl.LOCK_SH)
        for number in range(8):
            if os.fork() == 0 and number == 2:
                os.setsid()
        time.sleep(60)
    if solution_str == "together":
        for _ in range(4):
            if os.fork() == 0:
                ballast = b"x" * 10**8
                time.sleep(60)
                os._exit(0)
        time.sleep(60)
    if solution_str == "here":
        Path("scratch").write_text("mine")
        return {"score": 1.0, "pred": os.getcwd()}
    return 1.0

async def act_async(solution_str):
    await asyncio.sleep(0.01)
    if solution_str == "block":
        time.sleep(60)
    return act(solution_str)

def act_on_all(solution_strs):
    return [act(text) for text in solution_strs]

def connect(solution_str):
    with socket.create_connection(("127.0.0.1", int(solution_str)), timeout=2):
        return 1.0

def locally(solution_str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=2).close()
    return 1.0
"""
SMALL = Sandbox(memory_gib=1.0, cpu_s=0.5, file_gib=2**-10, max_processes=8)


class UntrustedScorers:
    """Scorers of the functions above, one per function, deadline and sandbox."""

    def __init__(self, folder: Path) -> None:
        self.note, self._path = folder / "note", folder / "untrusted.py"
        self._path.write_text(f"NOTE = {str(self.note)!r}\n{UNTRUSTED}", encoding="utf-8")
        self._scorers: dict[Any, Scorer] = {}

    def __call__(
        self, *texts: str, name: str = "act", deadline: float = 20.0, sandbox: Sandbox = SMALL
    ) -> list[Any]:
        """Return the outcomes of these texts."""
        key = name, deadline, sandbox
        if key not in self._scorers:
            spec = FunctionSpec(str(self._path), name, deadline=deadline, sandbox=sandbox)
            self._scorers[key] = Scorer(spec, 60.0)
            self._scorers[key].start()
        return self._scorers[key].score([{"solution_str": text} for text in texts])

    def stop(self, deadline: float | None = None) -> None:
        """Stop the scorers with this deadline, by default all."""
        for key, scorer in self._scorers.items():
            if deadline in (None, key[1]):
                scorer.stop()


@pytest.fixture(scope="module")
def untrusted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UntrustedScorers]:
    scorers = UntrustedScorers(tmp_path_factory.mktemp("untrusted"))
    yield scorers
    scorers.stop()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("crash", "the reward process was killed by SIGSEGV"),
        ("stop", "the reward process was stopped by SIGSTOP"),
        ("kill", "the reward process was killed by SIGKILL, as the system does when memory"),
        ("not an answer\n", "the reward process sent an invalid reply: b'not an answer'"),
        ("huge", "1e+308. Return a number that is finite in float32"),
        ("memory", "(its limit is reward.sandbox.memory_gib)"),
        ("cpu", "the reward process used up its processor time (cpu_s=0.5)"),
        ("disk", "OSError: [Errno 27] File too large"),
        ("many files", " GiB into its working folder (file_gib=0.000976562)"),
        ("open", "OSError: [Errno 24] Too many open files"),
        ("unspeakable", "Odd: (its message cannot be read)"),
        ("secret", "reward.sandbox.env=[SECRET_OF_TEST]"),
    ],
)
def test_only_the_sample_that_breaks_a_rule_fails_with_the_reason(
    untrusted: UntrustedScorers, text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", "1")
    before, guilty, after = untrusted("fine", text, "fine")
    assert before == after == (1.0, {}, None)
    assert guilty[:2] == (None, {})
    assert words in guilty[2]


def test_the_memory_limit_includes_forks(untrusted: UntrustedScorers) -> None:
    ((score, _, error),) = untrusted("together", sandbox=Sandbox(memory_gib=0.25))
    assert score is None
    assert "GiB of memory (memory_gib=0.25)" in error


def test_half_a_reply_misses_the_deadline(untrusted: UntrustedScorers) -> None:
    outcomes = untrusted("fine", "[0, [", "fine", deadline=1.0)
    assert [outcome[2] for outcome in outcomes] == [None, LATE, None]


def test_only_the_coroutine_that_blocks_fails(untrusted: UntrustedScorers) -> None:
    outcomes = untrusted(*["fine"] * 4, "block", *["fine"] * 4, name="act_async", deadline=1.0)
    assert [row for row, outcome in enumerate(outcomes) if outcome[0] is None] == [4]
    assert outcomes[4][2] == LATE


def test_only_coroutines_that_end_the_process_fail(untrusted: UntrustedScorers) -> None:
    outcomes = untrusted(*["fine"] * 5, "_exit", *["fine"] * 2, "exit", name="act_async")
    failed = {
        row: outcome[2].partition("\n")[0]
        for row, outcome in enumerate(outcomes)
        if outcome[0] is None
    }
    assert failed == {
        5: "the reward process ended with exit code 4",
        8: "SystemExit: it called sys.exit(3)",
    }


def test_a_batch_function_is_never_called_with_part_of_a_batch(untrusted: UntrustedScorers) -> None:
    outcomes = untrusted("fine", "_exit", name="act_on_all")
    assert outcomes == [(None, {}, "the reward process ended with exit code 4")] * 2


def test_forks_in_other_sessions_end_with_the_process(untrusted: UntrustedScorers) -> None:
    untrusted.note.unlink(missing_ok=True)
    hung, after = untrusted("fork", "fine", deadline=1.5)
    assert (hung[2], after) == (LATE, (1.0, {}, None))
    wait_until_ended(int(untrusted.note.read_text()))


@pytest.mark.parametrize("name", ["act", "act_async", "act_on_all"])
def test_no_sample_gets_the_score_of_a_fork(untrusted: UntrustedScorers, name: str) -> None:
    outcomes = untrusted("fork, and go on in both", "fine", name=name)
    assert [score for score, _, _ in outcomes] == [2.0, 1.0]
    time.sleep(0.4)
    assert [score for score, _, _ in untrusted(*["fine"] * 3, name=name)] == [1.0] * 3


def test_too_many_forks_end_the_process_and_all_forks(untrusted: UntrustedScorers) -> None:
    before, guilty, after = untrusted("fine", "bomb", "fine")
    assert (before[0], guilty[0], after[0]) == (1.0, None, 1.0)
    assert " processes (max_processes=8)" in guilty[2]
    with untrusted.note.open() as file:  # a process that is left holds the lock
        wait_until(lambda: is_free(file))


def is_free(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


DRIVER = """
import os, sys, time
from verl_like.process.family import descendants
from workers.rewards.process import FunctionSpec
from workers.rewards.scorer import Scorer

scorer = Scorer(FunctionSpec(), 60.0)  # garbage collection would stop it
scorer.start()
print(*descendants(os.getpid()), flush=True)
time.sleep(60)
"""


def test_reward_processes_end_when_their_driver_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        driver.kill()
    wait_until_ended(*pids)


def test_the_working_folder_is_removed_with_the_process(untrusted: UntrustedScorers) -> None:
    ((_, numbers, _),) = untrusted("here", deadline=4.5, sandbox=Sandbox())
    folder = Path(numbers["pred"])
    assert (folder / "scratch").read_text() == "mine"
    untrusted.stop(deadline=4.5)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("supervisor", "the reward process and its supervisor are gone"),
        ("supervisor, and stays", LATE),
    ],
)
def test_a_function_that_kills_its_supervisor_is_killed(
    untrusted: UntrustedScorers, text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_start_python", start_python)  # a fork has its server's variables
    before, guilty, after = untrusted("fine", text, "fine", deadline=1.1)
    assert (before[0], guilty, after[0]) == (1.0, (None, {}, words), 1.0)
    pid, folder = untrusted.note.read_text().split()
    wait_until_ended(int(pid))
    assert not Path(folder).exists()


def test_a_paused_supervisor_ends_as_soon_as_its_scorer_stops(
    untrusted: UntrustedScorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_like.process.pool.END_S", 60.0)
    begin = time.monotonic()
    untrusted("stopped supervisor", deadline=19.0)
    untrusted.stop(deadline=19.0)
    assert time.monotonic() - begin < 50


@pytest.mark.parametrize(("name", "killed"), [("act", "supervisor"), ("act_async", "function")])
def test_an_idle_process_that_is_killed_fails_no_sample(
    untrusted: UntrustedScorers, name: str, killed: str
) -> None:
    ((group, _, _),) = untrusted("group", name=name)
    supervisor = int(Path(f"/proc/{int(group)}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor if killed == "supervisor" else int(group), signal.SIGKILL)
    assert untrusted("fine", "fine", name=name) == [(1.0, {}, None)] * 2


def test_output_is_bounded(untrusted: UntrustedScorers, capfd: pytest.CaptureFixture[str]) -> None:
    assert untrusted("print", deadline=6.0) == [(1.0, {}, None)]
    untrusted.stop(deadline=6.0)
    output = capfd.readouterr().out
    assert output.count("x") == MAX_OUTPUT
    assert output.endswith("[further output of this process is dropped]\n")


def test_no_command_line_names_the_function(
    untrusted: UntrustedScorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        child, "_start_python", start_python
    )  # a fork has the command line of its server
    untrusted("fine", deadline=7.0)
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())]
    assert any(b"workers.rewards.process" in line for line in lines)
    assert not any(b"untrusted" in line for line in lines)


def test_without_network_a_function_reaches_only_itself(untrusted: UntrustedScorers) -> None:
    import socket

    isolated = Sandbox(network=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert untrusted(port, name="connect")[0][0] == 1.0
        try:
            ((score, _, error),) = untrusted(port, name="connect", sandbox=isolated)
        except ConfigError as err:
            pytest.skip(str(err))
    assert score is None
    assert "ConnectionRefusedError" in error
    assert untrusted("", name="locally", sandbox=isolated)[0][0] == 1.0


def test_unread_samples_do_not_block_the_driver(untrusted: UntrustedScorers) -> None:
    outcomes = untrusted("stop", *["x" * 100_000] * 20, deadline=3.0)
    assert [outcome[0] for outcome in outcomes] == [None] + [1.0] * 20


def test_a_load_error_is_reported_even_if_the_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_ended(*_: Any) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "pidfd_open", has_ended)
    (tmp_path / "broken.py").write_text("def f(:", encoding="utf-8")
    scorer = Scorer(FunctionSpec(str(tmp_path / "broken.py"), "f"), 60.0)
    with pytest.raises(ConfigError, match="broken.py, line 1: invalid syntax: def f"):
        scorer.start()
