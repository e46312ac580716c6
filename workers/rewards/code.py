"""Rewards of programs: the last block of code in a response is run on tests.

The rule of the data sources codecontests, apps, codeforces and taco, with verl's form of
`ground_truth` (a dict, or its JSON):

    {"inputs": [text, ...], "outputs": [text, ...]}                    # standard input and output
    {"fn_name": name, "inputs": [arguments, ...], "outputs": [...]}    # calls of a function
    {"asserts": ["assert f(1) == 2", ...]}                             # see `asserts`

Programs run in processes of `workers.rewards.program`, which never hold what a test expects.
Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import re
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from verl_like.errors import ConfigError
from verl_like.process.child import start_child
from workers.rewards.asserts import Check, literal, read_assert, value_of
from workers.rewards.channel import DriverEnd, NoAnswerError
from workers.rewards.program import Program

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
NOT_TRUSTED = (
    "what it expects cannot be kept from the model's program, which could then forge its score. "
    "Write asserts as `assert f(...) == value`, give the tests as inputs and outputs (with fn_name "
    "for calls of a function), or trust the programs: {way}."
)
START_S = 5.0
"""Time beside the tests' own: the start of the process, and of its forks."""
CLOSE = 1e-6
"""Numbers in an output may differ from the expected ones by so much, absolutely or as a share."""


def run_tests(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    num_tests: int = 10,
    time_s: float = 2.0,
    total_s: float = 8.0,
    memory_gb: float = 1.0,
    network: bool = False,
    trust_programs: bool = False,
) -> dict[str, float]:
    """The share of the first `num_tests` tests that the program passes; `acc`: whether all.

    A test has `time_s` seconds, all together `total_s`: less than a sample's deadline. Asserts
    whose expected side cannot be kept from the program are rejected unless `trust_programs`.
    """
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else dict(ground_truth)
    open_assert = find_open_assert(tests)
    if open_assert is not None and not trust_programs:
        ways = "reward.trust_programs=true, `serve-reward --trust-programs`, or trust_programs=True"
        raise ConfigError(f"ground_truth has {open_assert!r:.200}: {NOT_TRUSTED.format(way=ways)}")
    kind, inputs, expected = _read_tests(tests, num_tests, is_open=open_assert is not None)
    limits = {"time_s": time_s, "total_s": total_s, "memory_gb": memory_gb}
    runner = _runners[network]
    code, function = code_of(solution_str), str(tests.get("fn_name") or "")
    if not code.strip():
        return {"score": 0.0, "acc": 0.0}
    results = runner.results(Program(code, inputs, kind, function, **limits))
    if kind == "value" and any(problem is None for _, problem in results.values()):
        expected = _evaluate(runner, expected, limits)
    passed = 0
    for number, wanted in enumerate(expected):
        output, problem = results.get(number, ("", "was not run"))
        passed += problem is None and is_expected(kind, output, wanted)
    return {"score": passed / len(expected), "acc": float(passed == len(expected))}


def _evaluate(
    runner: _Runner, checks: list[Check], limits: Mapping[str, float]
) -> list[tuple[Check, list[Any]]]:
    """Return each check with its expected values, which are computed without the program."""
    values = {}
    for source in {source for check in checks for source in check.expected}:
        with contextlib.suppress(ValueError):
            values[source] = literal(source)  # most are, and then need no process
    sources = list(dict.fromkeys(s for check in checks for s in check.expected if s not in values))
    program = Program("import math", sources, "value", **limits)
    results = runner.results(program) if sources else {}
    for number, source in enumerate(sources):
        text, problem = results.get(number, ("", "was not run"))
        if problem is not None:
            raise ValueError(f"ground_truth: the expected side {source} {problem}")
        values[source] = value_of(text)
    return [(check, [values[source] for source in check.expected]) for check in checks]


def _read_tests(
    tests: Mapping[str, Any], most: int, is_open: bool
) -> tuple[str, list[Any], list[Any]]:
    """(kind, inputs, expected outputs) of the first tests."""
    if "asserts" in tests:
        lines = [str(line) for line in tests["asserts"]][:most]
        if is_open:
            kind, inputs, outputs = "assert", lines, [None] * len(lines)
        else:
            outputs = [check for check in map(read_assert, lines) if check is not None]
            kind, inputs = "value", [check.computed for check in outputs]
    else:
        inputs, outputs = list(tests["inputs"])[:most], list(tests["outputs"])[:most]
        kind = "function" if tests.get("fn_name") else "stdin"
        read = _arguments if kind == "function" else _text
        inputs = [read(given) for given in inputs]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs; as many, and one "
            "at least"
        )
    return kind, inputs, outputs


def find_open_assert(ground_truth: Any) -> str | None:
    """The first assert whose expected side cannot be kept from a program, if there is one."""
    if isinstance(ground_truth, str):
        if '"asserts"' not in ground_truth:
            return None
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            return None
    if not isinstance(ground_truth, Mapping) or "asserts" not in ground_truth:
        return None
    return next((str(a) for a in ground_truth["asserts"] if read_assert(str(a)) is None), None)


def _text(given: Any) -> str:
    """An input or output as text: lists have a line each."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _arguments(given: Any) -> list[Any]:
    """Arguments of a call: a list, or JSON with one a line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    return list(given)


def code_of(response: str) -> str:
    """The last block of code in a response, after its thoughts; without one, all of it."""
    answer = response.rpartition("</think>")[2]
    blocks = _BLOCK.findall(answer)
    return str(blocks[-1]) if blocks else answer


def is_expected(kind: str, output: str, expected: Any) -> bool:
    """Whether a program's output, or its function's result as JSON, is the expected one."""
    if kind == "assert":
        return True
    if kind == "value":
        check, wanted = expected
        return check.holds(value_of(output), wanted)
    if kind == "stdin":
        return _alike(output.split(), _text(expected).split())
    try:
        found = json.loads(output)
        wanted = json.loads(expected) if isinstance(expected, str) else expected
    except ValueError:
        found, wanted = output, expected
    in_a_list = isinstance(wanted, list) and len(wanted) == 1 and _equal(found, wanted[0])
    return in_a_list or _equal(found, wanted)


def _equal(found: Any, wanted: Any) -> bool:
    if isinstance(found, float) or isinstance(wanted, float):
        return _alike([str(found)], [str(wanted)])
    return bool(found == wanted)


def _alike(found: list[str], wanted: list[str]) -> bool:
    """Whether words are the same, numbers among them nearly."""
    if len(found) != len(wanted):
        return False
    return all(a == b or _close(a, b) for a, b in zip(found, wanted, strict=True))


def _close(found: str, wanted: str) -> bool:
    try:
        return math.isclose(float(found), float(wanted), rel_tol=CLOSE, abs_tol=CLOSE)
    except ValueError:
        return False


class _Runner:
    """The process that runs programs; started when it is needed, and anew when one has ended it."""

    def __init__(self, network: bool) -> None:
        self._network = "on" if network else "off"
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: DriverEnd | None = None

    def results(self, program: Program) -> dict[int, tuple[str, str | None]]:
        """Output and problem of every test that was run."""
        deadline = time.monotonic() + program.total_s + START_S
        found: dict[int, tuple[str, str | None]] = {}
        try:
            if self._channel is None:
                self._process, pipe = start_child("workers.rewards.program", self._network)
                self._channel = DriverEnd(pipe)
                atexit.register(self.stop)
            self._channel.send(program, deadline)
            for expected in range(len(program.inputs)):
                number, output, problem = self._channel.receive(deadline)
                if number != expected:
                    raise NoAnswerError(f"answered for test {number!r:.40}")
                found[expected] = str(output), problem
        except (NoAnswerError, EOFError, OSError, TypeError, ValueError):
            self.stop()  # the program has reached out of its fork: what is left of it has failed
        return found

    def stop(self) -> None:
        """Kill it; its forks die with it."""
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
        self._process = self._channel = None
        atexit.unregister(self.stop)


_runners = {network: _Runner(network) for network in (False, True)}
