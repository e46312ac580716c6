"""Turn asserts into tests of a program that never sees the expected values.

    read_assert("assert add(1, 2) == 3")    # Check("add(1, 2)", ("3",), EQUAL)

The computed side is evaluated after the program has run, in the program's process, which sends its
value back. The expected side is evaluated and compared in processes that run no model's code, so a
program can neither look it up nor fake equality. Asserts of other forms cannot be split like this.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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
