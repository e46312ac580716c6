"""Programs of a model are run on tests: right ones score, and no other way to a score works."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_like.errors import ConfigError
from verl_like.process.machine import descendants
from workers.rewards.code import _runners, code_of, has_asserts, is_expected, run_tests
from workers.rewards.functions import default_compute_score
from workers.rewards.process import FunctionSpec
from workers.rewards.program import Program
from workers.rewards.scorer import Scorer

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS = {"fn_name": "add", "inputs": ["1\n2", [3, 4]], "outputs": ["3", [7]]}
ASSERTS = {"asserts": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]}
ADD = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module", autouse=True)
def runner() -> Iterator[None]:
    yield
    for runner in _runners.values():
        runner.stop()


def score(code: str, tests: Any = SUMS, **limits: Any) -> float:
    limits = {"time_s": 4.0, "memory_gb": 0.5, **limits}
    return run_tests("apps", f"Thus:\n```python\n{code}\n```\n", tests, **limits)["score"]


def has_namespaces() -> bool:
    program = "from verl_like.process.sandbox import isolate_network; isolate_network()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    return done.returncode == 0


def test_a_program_gets_the_share_of_tests_that_it_passes() -> None:
    assert score("print(sum(map(int, input().split())))") == 1.0
    assert score("input(); print(7)") == 0.5
    assert score("import sys; print(sum(map(int, sys.stdin.read().split()))); sys.exit()") == 1.0
    assert score("print(3") == 0.0


def test_functions_are_called_and_assertions_hold() -> None:
    in_class = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert score(ADD, CALLS) == score(in_class, CALLS) == 1.0
    assert score(ADD, ASSERTS, trust_programs=True) == 1.0
    wrong = ADD.replace("a + b", "3")
    assert score(wrong, CALLS) == score(wrong, ASSERTS, trust_programs=True) == 0.5


def test_asserts_are_rejected_unless_programs_are_trusted() -> None:
    words = "read the grader's token .* write outside its folder.*reward.trust_programs=true"
    for tests in (ASSERTS, json.dumps(ASSERTS)):
        with pytest.raises(ConfigError, match=words):
            score(ADD, tests)
        with pytest.raises(ConfigError, match=words):
            default_compute_score("taco", ADD, tests)
    found = default_compute_score("taco", ADD, ASSERTS, trust_programs=True)
    assert found == {"score": 1.0, "acc": 1.0}


@pytest.mark.parametrize(
    ("ground_truth", "expected"),
    [
        (ASSERTS, True),
        (json.dumps(ASSERTS), True),
        (SUMS, False),
        ("asserts", False),
        ('{"asserts"', False),
        ('["asserts"]', False),
        (None, False),
    ],
)
def test_it_is_known_whether_tests_are_asserts(ground_truth: Any, expected: bool) -> None:
    assert has_asserts(ground_truth) is expected


def test_it_is_the_rule_of_verl_s_data_sources() -> None:
    answer = "print(sum(map(int, input().split())))"
    found = default_compute_score("codecontests", answer, json.dumps(SUMS))
    assert found == {"score": 1.0, "acc": 1.0}


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
    limits = {"total_s": 1.5, "time_s": 0.3, "trust_programs": True}
    assert score(f"{ADD}{code}", ASSERTS, **limits) == 0.0


SHARED = "import mmap\nkept = mmap.mmap(-1, 2**28)\nfor _ in range(2**8): kept.write(bytes(2**20))"
FILES = "for number in range(5000):\n    open(f'{number}', 'w').close()"
TALKS = "while True:\n    print(end='.', flush=True)\n    time.sleep(0.01)"
SAYS_NO_MORE = "import os\nos.close(1)\ntime.sleep(60)"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (f"{SHARED}\n{TALKS}", "GiB of memory (memory_gb=0.125)"),
        (f"{SHARED}\n{SAYS_NO_MORE}", "GiB of memory (memory_gb=0.125)"),
        (f"{FILES}\n{SAYS_NO_MORE}", "GiB in its working folder (file_gb=0.015625)"),
    ],
)
def test_a_program_is_watched_whatever_it_prints(code: str, words: str) -> None:
    program = Program(f"import time\n{code}", [""], time_s=20.0, total_s=20.0, memory_gb=0.125)
    ((output, problem),) = _runners[False].results(program).values()
    assert output == ""
    assert words in str(problem)


def test_a_program_that_says_no_more_has_its_deadline() -> None:
    program = Program(f"import time\n{SAYS_NO_MORE}", [""], time_s=0.1)
    assert _runners[False].results(program) == {0: ("", "passed its deadline")}


def test_what_a_program_prints_is_bounded() -> None:
    long = {"inputs": [""], "outputs": ["x" * 2**20]}
    assert score("print('x' * 2**20)", long) == 0.0
    assert score("print('x' * 2**18)", {"inputs": [""], "outputs": ["x" * 2**18]}) == 1.0


LOOK = """
import gc
word, given, found = "never " + "sent", input(), False
for kept in gc.get_objects():
    if type(kept) in (dict, list, tuple):
        kept = list(kept.values()) if type(kept) is dict else kept
        found |= any(type(each) is str and word in each for each in kept if each is not word)
print(given, found)
"""


def test_what_is_expected_is_not_where_the_program_runs() -> None:
    assert score(LOOK, {"inputs": ["a"], "outputs": ["a False"], "note": "never sent"}) == 1.0
    assert score(LOOK, {"inputs": ["never sent"], "outputs": ["never sent True"]}) == 1.0


def test_without_the_network_a_program_reaches_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        call = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint(1)"
        one = {"inputs": [""], "outputs": ["1"]}
        assert score(call, one, network=True) == 1.0
        if not has_namespaces():
            pytest.skip("this machine gives no network namespace")
        assert score(call, one) == 0.0


def test_a_program_s_time_is_bounded_over_all_tests() -> None:
    many = {"inputs": [""] * 10, "outputs": [""] * 10}
    assert score("while True: pass", many, time_s=0.2, total_s=0.5) == 0.0


def test_the_last_block_after_the_thoughts_is_the_program() -> None:
    text = "<think>```python\nno\n```</think>```py\nfirst\n```then\n```\nlast\n"
    assert code_of(text) == "last\n"
    assert code_of("print(1)") == "print(1)"


@pytest.mark.parametrize(
    ("output", "expected", "right"),
    [("1 2\n", "1\n2", True), ("0.3333333", "0.33333334", True), ("1 2", "12", False)],
)
def test_outputs_are_compared_word_by_word(output: str, expected: str, right: bool) -> None:
    assert is_expected("stdin", output, expected) is right


def test_tests_that_are_none_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 inputs and 1 outputs"):
        run_tests("apps", "pass", {"inputs": ["", ""], "outputs": [""]})


def test_a_reward_process_runs_programs_and_takes_them_with_it() -> None:
    scorer = Scorer(FunctionSpec(deadline=20.0), 60.0)
    sample = {"data_source": "taco", "ground_truth": json.dumps(SUMS), "extra_info": {}}
    scorer.start()  # with whatever stays after it
    scorer.stop()
    others = set(descendants(os.getpid()))
    try:
        scorer.start()
        right, wrong = scorer.score(
            [{**sample, "solution_str": code} for code in (f"{ADD}print(add(3, 4))", "a = 1 +")]
        )
        family = [pid for pid in descendants(os.getpid()) if pid not in others]
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family]
    finally:
        scorer.stop()
    assert (right, wrong) == ((0.5, {"acc": 0.0}, None), (0.0, {"acc": 0.0}, None))
    assert any(b"workers.rewards.program" in line for line in lines)
    assert len(family) >= 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in family)
