"""Rewards for programs: run the last code block of a response on tests.

This is the rule of the data sources codecontests, apps, codeforces and taco. `ground_truth` is a
dict or its JSON. Its first two formats are those of verl:

    {"inputs": [text, ...], "outputs": [text, ...]}                    # standard input and output
    {"fn_name": name, "inputs": [arguments, ...], "outputs": [...]}    # calls of a function
    {"asserts": ["assert f(1) == 2", ...]}                             # see below

Programs run in processes of `workers.rewards.program`, which do not contain the expected values,
except with asserts that need `trust_programs`. This module does not import torch.

Asserts become tests of a program that never sees the expected values:

    read_assert("assert add(1, 2) == 3")    # Check("add(1, 2)", ("3",), EQUAL)

The computed side is evaluated after the program has run, in the program's process, which sends its
value back. The expected side is evaluated and compared in processes that run no model's code, so a
program can neither look it up nor fake equality. Asserts of other forms cannot be split like this.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import json
import math
import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

from verl_like.errors import ConfigError
from verl_like.process.child import start_child
from verl_like.process.pool import Process, ProcessFailure, ProcessPool
from verl_like.process.sandbox import check_can_confine_programs
from workers.rewards.program import Program

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
NOT_TRUSTED = (
    "the model's program could read the expected values and forge its score. Write asserts as "
    "`assert f(...) == value`, write the tests as inputs and outputs (with fn_name for calls of a "
    "function), or trust the programs: {way}."
)
START_S = 5.0
"""Seconds that the start of the process and its forks may take, in addition to the tests."""
TOLERANCE = 1e-6
"""Absolute and relative tolerance for numbers in an output."""


def run_tests(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    num_tests: int = 10,
    time_s: float = 2.0,
    total_s: float = 8.0,
    memory_gib: float = 1.0,
    network: bool = False,
    trust_programs: bool = False,
) -> dict[str, float]:
    """Run the tests of a program. `score` is the fraction that pass; `acc` is 1 if all do.

    Args:
        data_source: is not read.
        solution_str: the response, which contains the program.
        ground_truth: the tests, as a dict or its JSON.
        extra_info: is not read.
        num_tests: largest number of tests.
        time_s: limit of a test in seconds.
        total_s: limit of all tests in seconds, less than a sample's deadline (`reward.timeout_s`).
        memory_gib: limit of the program's memory in GiB.
        network: let the program use the network.
        trust_programs: accept asserts whose expected side cannot be hidden from the program.
    """
    check_can_confine_programs()
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else dict(ground_truth)
    open_assert = find_open_assert(tests)
    if open_assert is not None and not trust_programs:
        ways = "reward.trust_programs=true, `serve-reward --trust-programs`, or trust_programs=True"
        raise ConfigError(f"ground_truth has {open_assert!r:.200}: {NOT_TRUSTED.format(way=ways)}")
    kind, inputs, expected = _read_tests(tests, num_tests, is_open=open_assert is not None)
    limits: dict[str, Any] = {"time_s": time_s, "total_s": total_s, "memory_gib": memory_gib}
    runner = _runners[network]
    code, function = code_of(solution_str), str(tests.get("fn_name") or "")
    if not code.strip():
        return {"score": 0.0, "acc": 0.0}
    results = runner.results(Program(code, inputs, kind, function, **limits))
    if kind == "value" and any(problem is None for _, problem in results.values()):
        expected = _evaluate(expected, limits)
    passed = 0
    for number, target in enumerate(expected):
        output, problem = results.get(number, ("", "was not run"))
        passed += problem is None and is_expected(kind, output, target)
    return {"score": passed / len(expected), "acc": float(passed == len(expected))}


def _evaluate(checks: list[Check], limits: Mapping[str, Any]) -> list[tuple[Check, list[Any]]]:
    """Return each check with its expected values, from a process that never ran a program."""
    values = {}
    for source in {source for check in checks for source in check.expected}:
        with contextlib.suppress(ValueError):
            values[source] = literal(source)  # a literal, as most are, needs no process
    sources = list(dict.fromkeys(s for check in checks for s in check.expected if s not in values))
    program = Program("import math", sources, "value", **limits)
    results = _evaluator.results(program) if sources else {}
    for number, source in enumerate(sources):
        text, problem = results.get(number, ("", "was not run"))
        if problem is not None:
            raise ValueError(f"ground_truth: the expected value {source} of an assert {problem}")
        values[source] = value_of(text)
    return [(check, [values[source] for source in check.expected]) for check in checks]


def _read_tests(
    tests: Mapping[str, Any], most: int, is_open: bool
) -> tuple[str, list[Any], list[Any]]:
    """Return the kind of the tests, and the inputs and expected outputs of the first `most`."""
    inputs: list[Any]
    outputs: list[Any]
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
        inputs = [read(test_input) for test_input in inputs]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"the first {most} tests of ground_truth have {len(inputs)} inputs and {len(outputs)} "
            "outputs. Write the same number of both, at least one."
        )
    return kind, inputs, outputs


def find_open_assert(ground_truth: Any) -> str | None:
    """Return the first assert whose expected side cannot be hidden from a program, or None."""
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


def _text(content: Any) -> str:
    """Return an input or output as text; a list becomes one line per element."""
    return "\n".join(map(str, content)) if isinstance(content, list) else str(content)


def _arguments(arguments: Any) -> list[Any]:
    """Return the arguments of a call, given as a list, or as text with one JSON value per line."""
    if isinstance(arguments, str):
        return [json.loads(line) for line in arguments.splitlines() if line.strip()]
    return list(arguments)


def code_of(response: str) -> str:
    """Return the last Python code block after a response's reasoning, or all text after it."""
    text = response.rpartition("</think>")[2]
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def is_expected(kind: str, output: str, expected: Any) -> bool:
    """Return True if a test's output (for a function, its result as JSON) is as expected."""
    if kind == "assert":
        return True
    if kind == "value":
        check, target = expected
        holds: bool = check.holds(value_of(output), target)
        return holds
    if kind == "stdin":
        return _alike(output.split(), _text(expected).split())
    try:
        result = json.loads(output)
        target = json.loads(expected) if isinstance(expected, str) else expected
    except ValueError:
        result, target = output, expected
    in_a_list = isinstance(target, list) and len(target) == 1 and _equal(result, target[0])
    return in_a_list or _equal(result, target)


def _equal(actual: Any, target: Any) -> bool:
    if isinstance(actual, float) or isinstance(target, float):
        return _alike([str(actual)], [str(target)])
    return bool(actual == target)


def _alike(actual: list[str], target: list[str]) -> bool:
    """Return True if two lists of words are equal, with a tolerance for numbers."""
    if len(actual) != len(target):
        return False
    return all(a == b or _close(a, b) for a, b in zip(actual, target, strict=True))


def _close(actual: str, target: str) -> bool:
    try:
        return math.isclose(float(actual), float(target), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False


class _Runner:
    """A process that runs programs; it is started when needed, and again if a program ends it."""

    def __init__(self, network: bool) -> None:
        self._network = "on" if network else "off"
        self._pool: ProcessPool | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def results(self, program: Program) -> dict[int, tuple[str, str | None]]:
        """Return the output, and the problem or None, of every test that ran, by its number."""
        results: dict[int, tuple[str, str | None]] = {}
        if self._pool is None:
            self._pool = ProcessPool()
            self._child, pipe = start_child("workers.rewards.program", self._network)
            with pipe:
                self._pool.add(Process(socket.socket(fileno=os.dup(pipe.fileno()))))
            atexit.register(self.stop)
        (process,) = self._pool.processes
        tests = {number: (program, number) for number in range(len(program.inputs))}
        self._pool.send(process, tests, inf, time.monotonic() + program.total_s + START_S)
        while process.waiting:
            for _, number, answer in self._pool.answers(inf):
                if isinstance(answer, ProcessFailure):  # a program disturbed it, or it is late
                    self.stop()
                    return results
                output, problem = answer
                results[number] = str(output), problem
        return results

    def stop(self) -> None:
        """Kill the process; its forks die with it."""
        if self._pool is not None and self._child is not None:
            self._pool.close()
            self._child.kill()
            self._child.wait()
        self._pool = self._child = None
        atexit.unregister(self.stop)


_runners = {network: _Runner(network) for network in (False, True)}
_evaluator = _Runner(network=False)


EQUAL, IS, CLOSE, BELOW, AT_MOST, TRUE = "equal", "is", "close", "below", "at most", "true"
_DISTANCES = {ast.Lt: BELOW, ast.LtE: AT_MOST}
_KNOWN = {*dir(builtins), "math"}
"""Names that have the same meaning without the program."""


@dataclass(frozen=True)
class Check:
    """An assert, split into a computed and an expected side."""

    computed: str
    """The expression that needs the program."""
    expected: tuple[str, ...]
    """The expected expression, then the expressions of tolerances; empty for the relation TRUE."""
    relation: str
    is_negated: bool = False

    def holds(self, value: Any, expected: Sequence[Any]) -> bool:
        """Return True if the assert holds for these values of the computed and expected sides."""
        return self._compare(value, *expected) is not self.is_negated

    def _compare(self, value: Any, *expected: Any) -> bool:
        if self.relation == TRUE:
            return bool(value)
        if self.relation == IS:
            return type(value) is type(expected[0]) and bool(value == expected[0])
        if self.relation == EQUAL:
            return bool(value == expected[0])
        try:
            if self.relation == CLOSE:
                return math.isclose(value, expected[0], rel_tol=expected[1], abs_tol=expected[2])
            distance = abs(value - expected[0])
            is_below: bool = distance < expected[1]
            return is_below or (self.relation == AT_MOST and bool(distance == expected[1]))
        except TypeError:  # not numbers
            return False


@lru_cache(maxsize=4096)
def read_assert(line: str) -> Check | None:
    """Split an assert into its sides; None if its expected side cannot be hidden from the program.

    Text that is not a single assert also gives None. The result is cached, because a row's asserts
    are read again for each of its samples.
    """
    try:
        statements = ast.parse(line.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if len(statements) != 1 or not isinstance(statements[0], ast.Assert):
        return None
    test = statements[0].test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        check = _read_test(test.operand)
        return check and Check(check.computed, check.expected, check.relation, not check.is_negated)
    return _read_test(test)


def _read_test(test: ast.expr) -> Check | None:
    """Return the check that an `assert` makes, or None if the program's answer is not compared."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _read_comparison(test.left, test.ops[0], test.comparators[0])
    if not isinstance(test, ast.Call):
        return None
    name = ast.unparse(test.func)
    if name in ("isclose", "math.isclose"):
        tolerances = {word.arg: word.value for word in test.keywords}
        if len(test.args) != 2 or not tolerances.keys() <= {"rel_tol", "abs_tol"}:
            return None
        relative = tolerances.get("rel_tol", ast.Constant(1e-9))
        absolute = tolerances.get("abs_tol", ast.Constant(0.0))
        left, right = test.args
        return _check(left, right, CLOSE, relative, absolute)
    arguments = [*test.args, *(word.value for word in test.keywords)]
    is_of_program = _needs_program(test.func) and not any(map(_needs_program, arguments))
    return Check(ast.unparse(test), (), TRUE) if is_of_program else None


def _read_comparison(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Check | None:
    """Return the check of an equality or of a largest distance, or None for other comparisons."""
    if isinstance(operator, ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
        relation = EQUAL if isinstance(operator, ast.Eq | ast.NotEq) else IS
        check = _check(left, right, relation)
        is_negated = isinstance(operator, ast.NotEq | ast.IsNot)
        return check and Check(check.computed, check.expected, relation, is_negated)
    is_distance = (
        isinstance(left, ast.Call)
        and ast.unparse(left.func) == "abs"
        and len(left.args) == 1
        and isinstance(left.args[0], ast.BinOp)
        and isinstance(left.args[0].op, ast.Sub)
    )
    if type(operator) not in _DISTANCES or not is_distance:
        return None
    difference = left.args[0]  # type: ignore[attr-defined]
    return _check(difference.left, difference.right, _DISTANCES[type(operator)], right)


def _check(left: ast.expr, right: ast.expr, relation: str, *tolerances: ast.expr) -> Check | None:
    """Return a check of these sides; None unless exactly one side needs the program."""
    if _needs_program(left) == _needs_program(right) or any(map(_needs_program, tolerances)):
        return None
    computed, expected = (left, right) if _needs_program(left) else (right, left)
    return Check(ast.unparse(computed), tuple(map(ast.unparse, (expected, *tolerances))), relation)


def _needs_program(expression: ast.expr) -> bool:
    """Return True if the expression uses a name that the program has to define."""
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    bound = {
        name.id
        for node in ast.walk(expression)
        if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target)
        if isinstance(name, ast.Name)
    }
    return not names <= _KNOWN | bound


def value_of(text: str) -> Any:
    """Return the value of a text that `repr` wrote, or the text itself if it is not a literal."""
    try:
        return literal(text)
    except ValueError:
        return text


def literal(text: str) -> Any:
    """Return the value of a Python literal, in which inf and nan are allowed.

    Raise a ValueError for other text.
    """
    try:
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            for name, child in ast.iter_fields(node):
                if isinstance(child, list):
                    setattr(node, name, [_number(element) for element in child])
                else:
                    setattr(node, name, _number(child))
        return ast.literal_eval(tree)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a Python literal: {text:.80}") from error


def _number(node: Any) -> Any:
    """Replace the names inf and nan, which `repr` writes, with numbers."""
    is_number = isinstance(node, ast.Name) and node.id in ("inf", "nan")
    return ast.copy_location(ast.Constant(float(node.id)), node) if is_number else node
