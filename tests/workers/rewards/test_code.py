"""A model's programs are run on tests: correct programs score, and programs that cheat do not."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_like.errors import ConfigError
from verl_like.process.family import descendants
from verl_like.process.kernel_limits import can_restrict_writes
from workers.rewards.code import (
    _evaluator,
    _runners,
    code_of,
    find_open_assert,
    is_expected,
    read_assert,
    run_tests,
)
from workers.rewards.functions import default_compute_score
from workers.rewards.program import Program
from workers.rewards.scorer import FunctionSpec, Scorer

pytestmark = pytest.mark.linux
SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS = {"fn_name": "add", "inputs": ["1\n2", [3, 4]], "outputs": ["3", [7]]}
ASSERTS = {"asserts": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]}
ADD = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module", autouse=True)
def runner() -> Iterator[None]:
    yield
    for runner in (*_runners.values(), _evaluator):
        runner.stop()


def score(code: str, tests: Any = SUMS, **limits: Any) -> float:
    limits = {"time_s": 4.0, "memory_gib": 0.5, **limits}
    return run_tests("apps", f"Thus:\n```python\n{code}\n```\n", tests, **limits)["score"]


def has_namespaces() -> bool:
    program = "from verl_like.process.kernel_limits import isolate_network; isolate_network()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    return done.returncode == 0


def test_the_score_is_the_fraction_of_passed_tests() -> None:
    assert score("print(sum(map(int, input().split())))") == 1.0
    assert score("input(); print(7)") == 0.5
    assert score("import sys; print(sum(map(int, sys.stdin.read().split()))); sys.exit()") == 1.0
    assert score("print(3") == 0.0


def test_functions_are_called_and_assertions_hold() -> None:
    in_class = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert score(ADD, CALLS) == score(in_class, CALLS) == 1.0
    assert score(ADD, ASSERTS) == 1.0
    wrong = ADD.replace("a + b", "3")
    assert score(wrong, CALLS) == score(wrong, ASSERTS) == 0.5


OPEN = {"asserts": ["assert add(1, 2) == 3", "assert same(add(3, 4), 7)"]}


def test_asserts_that_a_program_could_forge_need_trust() -> None:
    words = "same.*forge its score.*reward.trust_programs=true"
    for tests in (OPEN, json.dumps(OPEN)):
        with pytest.raises(ConfigError, match=words):
            score(ADD, tests)
        with pytest.raises(ConfigError, match=words):
            default_compute_score("taco", ADD, tests)
    right = f"{ADD}def same(a, b):\n    return a == b\n"
    result = default_compute_score("taco", right, OPEN, trust_programs=True)
    assert result == {"score": 1.0, "acc": 1.0}


@pytest.mark.parametrize(
    ("ground_truth", "expected"),
    [
        (ASSERTS, None),
        (json.dumps(OPEN), "assert same(add(3, 4), 7)"),
        (SUMS, None),
        ("asserts", None),
        ('{"asserts"', None),
        ('["asserts"]', None),
        (None, None),
    ],
)
def test_the_first_assert_that_needs_trust_is_found(
    ground_truth: Any, expected: str | None
) -> None:
    assert find_open_assert(ground_truth) == expected


FRAMES = """
import gc, sys
def add(a, b):
    frame, names = sys._getframe(), []
    while frame is not None:
        names += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    names += gc.get_objects()
    for value in list(names):
        if type(value) in (list, tuple) and value and value[0] == 12345:
            return 12345
    texts = [value for value in names if type(value) is str]
    return 12345 if any("12" + "345" in text for text in texts if text != CODE) else None
"""
FORGES = """
class Equal:
    def __eq__(self, other): return True
    def __bool__(self): return True
def add(a, b): return Equal()
abs = isclose = lambda *a, **k: True
"""


@pytest.mark.parametrize("code", [f"CODE = {FRAMES!r}\n{FRAMES}", FORGES])
@pytest.mark.parametrize(
    "line",
    [
        "assert add(1, 2) == 12345",
        "assert 12345 == add(1, 2)",
        "assert abs(add(1, 2) - 12345) < 0.5",
        "assert math.isclose(add(1, 2), 12345)",
        "assert [add(n, n) for n in range(2)] == [12345, 12345]",
    ],
)
def test_a_program_cannot_find_or_forge_expected_values(code: str, line: str) -> None:
    assert score(code, {"asserts": [line]}) == 0.0
    assert score("def add(a, b): return 12345", {"asserts": [line]}) == 1.0


@pytest.mark.parametrize(
    ("line", "right", "wrong"),
    [
        ("assert f(1) != 3", "4", "3"),
        ("assert f(1) is True", "True", "1"),
        ("assert f(1) == True", "1", "0"),
        ("assert f(1)", "[0]", "[]"),
        ("assert not f(1)", "''", "'no'"),
        ("assert set(f(1)) == set([1, 2])", "(2, 1)", "(2,)"),
        ("assert f(1) == {'a': (1, None)}", "{'a': (1, None)}", "{'a': [1, None]}"),
        ("assert f(1) == float('inf')", "float('inf')", "1e300"),
        ("assert abs(f(1) - 2.5) <= 0.5", "3.0", "3.1"),
        ("assert math.isclose(f(1), 2.5, rel_tol=0.1)", "2.7", "2.8"),
        ("assert f(1) == [x * 2 for x in (1, 2)]", "[2, 4]", "[2]"),
    ],
)
def test_asserts_hold_as_in_python(line: str, right: str, wrong: str) -> None:
    for value, expected in ((right, 1.0), (wrong, 0.0)):
        assert score(f"def f(a): return {value}", {"asserts": [line]}) == expected


@pytest.mark.parametrize(
    "line",
    [
        *("f(1) == 1", "assert f(1) < 3", "assert f(1) == f(2)", "assert 1 == 1", "assert"),
        *("assert same(f(1), 1)", "assert f(1) == 1 and f(2) == 2", "assert 0 < f(1) < 3"),
        *(
            "assert all(f(n) == n for n in range(3))",
            "assert f(1) == 1; f(2)",
            "assert " + "(" * 999,
        ),
    ],
)
def test_other_asserts_have_no_separate_expected_side(line: str) -> None:
    assert read_assert(line) is None


OUTSIDE = """
import os, pathlib, signal, ctypes, fcntl, resource, socket, struct
folder, pid = {folder!r}, {pid}
def is_allowed(act):
    try:
        act()
    except (OSError, PermissionError):
        return False
    return True
libc = ctypes.CDLL(None, use_errno=True)
def attach():
    if libc.ptrace(16, pid, 0, 0) != 0:
        raise OSError
pipe, inet = os.pipe()[0], socket.socket()
me = struct.pack("i", pid)
acts = [
    lambda: pathlib.Path(folder, "new").write_text("x"),
    lambda: os.unlink(folder + "/old"),
    lambda: os.chmod(folder + "/old", 0o777),
    lambda: os.utime(folder + "/old", (1, 1)),
    lambda: os.chown(folder + "/old", os.getuid(), os.getgid()),
    lambda: os.setxattr(folder + "/old", "user.a", b"b"),
    lambda: os.kill(pid, signal.SIGSTOP),
    lambda: os.pidfd_open(pid) and signal.pidfd_send_signal(os.pidfd_open(pid), 9),
    lambda: open(f"/proc/{{pid}}/mem", "r+b"),
    lambda: os.mkfifo("fifo"),
    lambda: os.mknod("device", 0o20666, os.makedev(1, 3)),
    lambda: os.memfd_create("more"),
    attach,
    lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)),
    lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE),
    lambda: fcntl.fcntl(pipe, fcntl.F_SETOWN, pid),
    lambda: fcntl.fcntl(pipe, 15, struct.pack("ii", 1, pid)),  # F_SETOWN_EX
    lambda: fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL),
    lambda: fcntl.ioctl(inet, 0x8901, me),  # FIOSETOWN
    lambda: fcntl.ioctl(inet, 0x8902, me),  # SIOCSPGRP
    lambda: libc.syscall({ioprio_set}, 1, pid, 3 << 13) == 0 or os.stat("missing"),
    lambda: fcntl.ioctl(os.open(folder + "/old", os.O_RDONLY), 0x40086602, bytes(8)),
    lambda: fcntl.ioctl(os.open(folder + "/old", os.O_RDONLY), 0x401C5820, bytes(28)),
]
# without times they succeed, but must have no effect
os.utime(folder + "/old")
libc.utimes((folder + "/old").encode(), None)
os.utime(os.open(folder + "/old", os.O_RDONLY))
limits = resource.prlimit(0, resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_NONBLOCK)
fcntl.ioctl(pipe, 0x541B, bytes(4))  # FIONREAD
print(sum(map(is_allowed, acts)), is_allowed(lambda: open("mine", "w").close()))
"""


def test_a_program_changes_nothing_outside_its_folder(tmp_path: Path) -> None:
    if not can_restrict_writes():
        pytest.skip("this machine has no Landlock")
    (tmp_path / "old").write_text("x")
    os.utime(tmp_path / "old", (1, 1))
    with subprocess.Popen(["sleep", "60"]) as other:
        number = {"x86_64": 251, "aarch64": 30}[platform.machine()]
        code = OUTSIDE.format(folder=str(tmp_path), pid=other.pid, ioprio_set=number)
        result = score(code, {"inputs": [""], "outputs": ["0 True"]})
        state = Path(f"/proc/{other.pid}/stat").read_text().split()[2]
        other.kill()
    assert (result, state) == (1.0, "S")
    assert [file.name for file in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").stat().st_mtime == 1


def test_verls_data_sources_use_this_rule() -> None:
    program = "print(sum(map(int, input().split())))"
    result = default_compute_score("codecontests", program, json.dumps(SUMS))
    assert result == {"score": 1.0, "acc": 1.0}


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytearray(2**30)",
        "open('f', 'wb').write(bytes(2**25))",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
    ],
)
def test_a_program_that_breaks_a_rule_scores_zero(code: str) -> None:
    limits = {"total_s": 1.5, "time_s": 0.3}
    assert score(f"{ADD}{code}", ASSERTS, **limits) == 0.0


SHARED = "import mmap\nm = mmap.mmap(-1, 2**28)\nfor _ in range(2**8): m.write(bytes(2**20))"
FILES = "for number in range(3):\n    open(f'{number}', 'wb').write(bytes(2**23))"
PRINTS = "while True:\n    print(end='.', flush=True)\n    time.sleep(0.01)"
CLOSES_OUTPUT = "import os\nos.close(1)\ntime.sleep(60)"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (f"{SHARED}\n{PRINTS}", "GiB of memory (memory_gib=0.125)"),
        (f"{FILES}\n{CLOSES_OUTPUT}", "GiB into its working folder (file_gib=0.015625)"),
    ],
)
def test_a_program_that_breaks_a_limit_is_stopped_in_any_state(code: str, words: str) -> None:
    program = Program(f"import time\n{code}", [""], time_s=60.0, total_s=60.0, memory_gib=0.125)
    ((output, problem),) = _runners[False].results(program).values()
    assert output == ""
    assert words in str(problem)


def test_a_program_that_closes_its_output_has_a_deadline() -> None:
    program = Program(f"import time\n{CLOSES_OUTPUT}", [""], time_s=0.1)
    assert _runners[False].results(program) == {0: ("", "passed its deadline")}


def test_a_programs_output_is_bounded() -> None:
    long = {"inputs": [""], "outputs": ["x" * 2**20]}
    assert score("print('x' * 2**20)", long) == 0.0
    assert score("print('x' * 2**18)", {"inputs": [""], "outputs": ["x" * 2**18]}) == 1.0


LOOK = """
import gc
word, line, is_here = "never " + "sent", input(), False
for values in gc.get_objects():
    if type(values) in (dict, list, tuple):
        values = list(values.values()) if type(values) is dict else values
        is_here |= any(type(v) is str and word in v for v in values if v is not word)
print(line, is_here)
"""


def test_expected_values_are_not_in_the_programs_process() -> None:
    assert score(LOOK, {"inputs": ["a"], "outputs": ["a False"], "note": "never sent"}) == 1.0
    assert score(LOOK, {"inputs": ["never sent"], "outputs": ["never sent True"]}) == 1.0


def test_expected_sides_are_evaluated_in_another_process() -> None:
    code = "import os\ndef parent(): return os.getppid()"
    assert score(code, {"asserts": ["assert parent() != __import__('os').getppid()"]}) == 1.0


def test_without_network_a_program_reaches_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        call = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint(1)"
        tests = {"inputs": [""], "outputs": ["1"]}
        assert score(call, tests, network=True) == 1.0
        if not has_namespaces():
            pytest.skip("this machine gives no network namespace")
        assert score(call, tests) == 0.0


PATHS = """
import multiprocessing, socket
def is_allowed(family, kind, address):
    try:
        with socket.socket(family, kind) as client:
            client.connect(address)
    except OSError:
        return False
    return True
addresses = [{stream!r}, {datagram!r}]
try:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    pair[0].connect(addresses[1])
    pair[0].send(b"x")
except OSError:
    pair = None
print(is_allowed(socket.AF_UNIX, socket.SOCK_STREAM, addresses[0]), end=" ")
print(is_allowed(socket.AF_UNIX, socket.SOCK_DGRAM, addresses[1]), pair is not None, end=" ")
a, b = multiprocessing.Pipe()
a.send(1)
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
print(b.recv())
"""


def test_without_network_a_program_reaches_no_unix_socket() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as sockets:
        code = PATHS
        for name, kind in (("stream", socket.SOCK_STREAM), ("datagram", socket.SOCK_DGRAM)):
            server = sockets.enter_context(socket.socket(socket.AF_UNIX, kind))
            server.bind(f"{folder}/{name}")
            if kind == socket.SOCK_STREAM:
                server.listen()
            code = code.replace(f"{{{name}!r}}", repr(f"{folder}/{name}"))
        reached, closed = (
            {"inputs": [""], "outputs": [f"{is_open} {is_open} {is_open} 1"]}
            for is_open in (True, False)
        )
        assert score(code, reached, network=True) == 1.0
        assert score(code, closed) == 1.0


def test_all_tests_together_have_a_time_limit() -> None:
    tests = {"inputs": [""] * 10, "outputs": [""] * 10}
    assert score("while True: pass", tests, time_s=0.2, total_s=0.5) == 0.0


def test_the_last_code_block_after_the_reasoning_is_the_program() -> None:
    text = "<think>```python\nno\n```</think>```py\nfirst\n```then\n```\nlast\n"
    assert code_of(text) == "last\n"
    assert code_of("print(1)") == "print(1)"


@pytest.mark.parametrize(
    ("output", "expected", "right"),
    [("1 2\n", "1\n2", True), ("0.3333333", "0.33333334", True), ("1 2", "12", False)],
)
def test_outputs_are_compared_word_by_word(output: str, expected: str, right: bool) -> None:
    assert is_expected("stdin", output, expected) is right


def test_as_many_outputs_as_inputs_are_required() -> None:
    with pytest.raises(ValueError, match="2 inputs and 1 outputs"):
        run_tests("apps", "pass", {"inputs": ["", ""], "outputs": [""]})


def test_a_reward_process_runs_programs_that_end_with_it() -> None:
    scorer = Scorer(FunctionSpec(deadline=20.0), 60.0)
    sample = {"data_source": "taco", "ground_truth": json.dumps(SUMS), "extra_info": {}}
    scorer.start()  # starts processes that remain, such as a fork server
    scorer.stop()
    before = set(descendants(os.getpid()))
    try:
        scorer.start()
        right, wrong = scorer.score(
            [{**sample, "solution_str": code} for code in (f"{ADD}print(add(3, 4))", "a = 1 +")]
        )
        family = [pid for pid in descendants(os.getpid()) if pid not in before]
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family]
    finally:
        scorer.stop()
    assert (right, wrong) == ((0.5, {"acc": 0.0}, None), (0.0, {"acc": 0.0}, None))
    assert any(b"workers.rewards.program" in line for line in lines)
    assert len(family) >= 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in family)
