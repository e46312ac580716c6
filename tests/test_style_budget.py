"""Limits of files, functions and copies; a step fits on one screen; plain names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT
from tests.import_graph import parsed

MAX_FILE, MAX_FUNCTION, MAX_STEP, MAX_COPY = 800, 120, 40, 20
FOLDERS = ("verl_like", "workers", "trainer", "examples", "tests", "benchmarks", "docs", "tools")
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Return (path, syntax tree) of every file."""
    for path in files(*folders):
        yield str(path.relative_to(ROOT)), parsed(path)


def num_lines(node: ast.stmt | ast.expr) -> int:
    assert node.end_lineno is not None, "ast gives every parsed node an end"
    return node.end_lineno - node.lineno + 1


def functions(tree: ast.AST) -> list[Function]:
    result = []
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, Function):
            result.append(node)
        pending += inner_statements(node)
    return result


def inner_statements(node: ast.AST) -> list[ast.AST]:
    """Return the children of a node that can hold a statement: an expression cannot."""
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]


def test_no_file_is_long() -> None:
    long = {}
    for path in files(*FOLDERS):
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > MAX_FILE:
            long[str(path.relative_to(ROOT))] = count
    assert long == {}


def test_no_function_is_long() -> None:
    long = {}
    for path, tree in trees("verl_like", "workers", "trainer", "examples", "benchmarks"):
        for function in functions(tree):
            if num_lines(function) > MAX_FUNCTION:
                long[f"{path}:{function.name}"] = num_lines(function)
    assert long == {}


def test_no_file_or_folder_has_a_vague_name() -> None:
    named = {path.relative_to(ROOT) for path in files(*FOLDERS)}
    assert {str(path) for path in named if VAGUE_NAMES & {*path.with_suffix("").parts}} == set()


def test_a_step_fits_on_one_screen() -> None:
    tree = parsed(ROOT / "trainer" / "ppo" / "stages.py")
    (step,) = [function for function in functions(tree) if function.name == "step"]
    assert num_lines(step) - length_of_docstring(step) <= MAX_STEP


def length_of_docstring(function: Function) -> int:
    return 0 if ast.get_docstring(function) is None else num_lines(function.body[0])


def test_no_two_places_share_twenty_lines() -> None:
    first_place: dict[tuple[str, ...], str] = {}
    copies = []
    for path in files("verl_like", "workers", "trainer", "examples", "benchmarks"):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        code = [line for line in lines if line and not line.startswith(("#", "import ", "from "))]
        for start in range(len(code) - MAX_COPY + 1):
            place = f"{path.relative_to(ROOT)}: {code[start]}"
            earlier = first_place.setdefault(tuple(code[start : start + MAX_COPY]), place)
            if earlier != place:
                copies.append(f"{earlier} and {place}")
    assert copies == [], "move the shared lines to one place"
