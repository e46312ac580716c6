"""Plant faults in a room's code, one at a time, and count those that its tests detect.

    python tools/mutants.py ROOM... [--count 20] [--seed 0] [--also TESTS ...]
    python tools/mutants.py workers/losses trainer/data --also tests/integration

A fault changes one comparison, operator, number, condition or call of a function, never a message.
The tests of the file run first, then those of the room, then those in `--also`. Faults that no test
detects are printed; a fault that cannot change any result is not told apart.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LANE = "not ray and not example and not slow and not vllm and not tinker and not long"
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
"""The operators that a fault replaces, and the new ones."""
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGS = ("logger", "warnings", "super")
LIMIT_S = 300.0
"""A test run that takes longer has detected its fault."""


def faults(function: ast.AST) -> Iterator[tuple[ast.AST, Callable[[], None]]]:
    """Yield each place in a function where a fault can be planted, and what plants it."""
    for node in _computing(function):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
            yield node, lambda node=node: node.ops.__setitem__(0, OTHER[type(node.ops[0])]())
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OTHER:
            yield node, lambda node=node: setattr(node, "op", OTHER[type(node.op)]())
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, lambda node=node: setattr(node, "value", not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, lambda node=node: setattr(node, "value", node.value + 1)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node, lambda node=node: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield node, lambda node=node: setattr(node, "id", NAMES[node.id])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, lambda node=node: setattr(node, "value", ast.Constant(None))


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below this one, without messages, types, defaults and decorators."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "args", "decorator_list") and not isinstance(
            node, ast.Call
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.JoinedStr):
                continue
            if isinstance(child, ast.Expr) and ast.unparse(child).startswith(LOGS):
                continue
            yield child
            yield from _computing(child)


def places(text: str) -> int:
    """Return the number of places of a file where a fault can be planted."""
    return len(list(_all_faults(ast.parse(text))))


def planted(text: str, number: int) -> tuple[str, str]:
    """Return the text with the fault of this number, and the changed line with its number."""
    tree = ast.parse(text)
    node, plant = list(_all_faults(tree))[number]
    line = node.lineno  # type: ignore[attr-defined]
    before = ast.unparse(node)
    plant()
    after = ast.unparse(ast.fix_missing_locations(tree))
    return after, f"{line}: {before.splitlines()[0]} -> {ast.unparse(node).splitlines()[0]}"


def _all_faults(tree: ast.AST) -> Iterator[tuple[ast.AST, Callable[[], None]]]:
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node not in inner:
            inner.update(child for child in ast.walk(node) if isinstance(child, ast.FunctionDef))
            yield from faults(node)


def passes(tree: Path, tests: list[str], deselected: list[str], output: Path) -> bool:
    """Return whether these tests pass in a fork of this process, which has libraries loaded."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", LANE]
        options += [f"--deselect={name}" for name in deselected]
        os._exit(pytest.main([*options, *tests]) not in (0, 5))
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def tests_of(tree: Path, file: str) -> list[str]:
    """Return the test files and folders that mirror a file."""
    folder, stem = tree / "tests" / Path(file).parent, Path(file).stem
    mirrors = [*folder.glob(f"test_{stem}.py"), *folder.glob(f"test_{stem}_*.py"), folder / stem]
    return [str(path.relative_to(tree)) for path in mirrors if path.exists()]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="+")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--also", nargs="*", default=[])
    chosen = parser.parse_args()
    for library in ("torch", "transformers", "ray", "pyarrow", "hydra"):
        __import__(library)
    with tempfile.TemporaryDirectory() as scratch:
        tree, output = Path(scratch) / "tree", Path(scratch) / "output"
        tree.mkdir()
        archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], stdout=-1, check=True)
        subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        for room in chosen.rooms:
            _check_room(room, chosen, tree, output)


def _check_room(room: str, chosen: argparse.Namespace, tree: Path, output: Path) -> None:
    drawn = random.Random(f"{room} {chosen.seed}")
    files = sorted(str(path.relative_to(tree)) for path in (tree / room).glob("**/*.py"))
    every = [(file, n) for file in files for n in range(places((tree / file).read_text()))]
    broken: list[str] = []
    while not passes(tree, [f"tests/{room}"], broken, output):
        lines = output.read_text().splitlines()
        failed = [line.split()[1] for line in lines if line[:7] == "FAILED "]
        assert failed, f"{room}: without a fault, its tests take more than {LIMIT_S:.0f} s"
        broken += failed
        print(f"{room}: without a fault, fails and is left out: {broken}", flush=True)
        assert len(broken) < 5, output.read_text()[-2000:]
    detected = 0
    for file, place in drawn.sample(every, chosen.count):
        text = (tree / file).read_text(encoding="utf-8")
        changed, change = planted(text, place)
        (tree / file).write_text(changed, encoding="utf-8")
        result = "MISSED"
        for tests in (tests_of(tree, file), [f"tests/{room}"], chosen.also):
            if tests and not passes(tree, tests, broken, output):
                result, detected = f"detected by {' '.join(tests)}", detected + 1
                break
        (tree / file).write_text(text, encoding="utf-8")
        print(f"{file}:{change}: {result}", flush=True)
    print(f"{room}: {detected} of {chosen.count} detected", flush=True)


if __name__ == "__main__":
    main()
