"""Budgets of STYLE: small files, smaller functions, a driver on one screen."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE, MAX_FUNCTION, MAX_STEP, MAX_MEDIAN = 400, 60, 40, 130
PACKAGES = ("verl_like", "workers", "trainer", "examples", "tests")


def files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None, "ast gives every parsed node an end"
    return node.end_lineno - node.lineno + 1


def test_no_file_is_long() -> None:
    assert {
        str(p.relative_to(ROOT)): n for p in files(*PACKAGES) if (n := num_lines(p)) > MAX_FILE
    } == {}


def test_no_function_is_long() -> None:
    long = {
        f"{p.relative_to(ROOT)}:{f.name}": n
        for p in files(*PACKAGES)
        for f in functions(p)
        if (n := length(f)) > MAX_FUNCTION
    }
    assert long == {}


def test_the_median_file_is_small() -> None:
    assert (
        statistics.median(num_lines(p) for p in files("verl_like", "workers", "trainer"))
        <= MAX_MEDIAN
    )


def test_a_step_fits_on_one_screen() -> None:
    (step,) = [f for f in functions(ROOT / "trainer" / "ppo" / "step.py") if f.name == "step"]
    docstring = length_of_docstring(step)
    assert length(step) - docstring <= MAX_STEP


def length_of_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    assert first.end_lineno is not None, "ast gives every parsed node an end"
    return first.end_lineno - first.lineno + 1
