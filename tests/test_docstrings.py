"""What docstrings and comments of the packages name is there: modules, and what is in them.

`trainer.save_freq` is a key of the configuration's section `trainer`, which has a package's name.
In an indented example `trainer` may also be a variable: there only longer names are looked up.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT
from tests.import_graph import (
    PACKAGES,
    defined_in,
    imports_of_file,
    module_name,
    parsed,
    sources,
)

DOTTED = re.compile(rf"(?<![\w./=-])(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
COMMENT = re.compile(r"(?:^|\s)# (.*)")
FILES = {"trainer.json"}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the packages, by its dotted name."""
    return {module_name(path): path for package in PACKAGES for path in sources(package)}


@functools.cache
def keys_of_trainer() -> set[str]:
    """The keys of the section `trainer`, of any recipe."""
    found = set()
    for path in sources("trainer"):
        for name in defined_in(path):
            section, _, key = name.partition(".")
            if section.endswith("TrainerConfig") and key:
                found.add(f"trainer.{key}")
    return found


def documentation(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of every line of a file's docstrings and comments."""
    pending: list[ast.AST] = [parsed(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines = inspect.cleandoc(str(node.value.value)).splitlines()
            yield from enumerate(lines, start=node.lineno)
        elif not isinstance(node, ast.expr):
            pending += ast.iter_child_nodes(node)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if comment := COMMENT.search(line):
            yield number, comment[1]


def named_in(line: str) -> list[str]:
    """The dotted names of a line that are to be there."""
    names = [name for name in DOTTED.findall(line) if name not in FILES]
    return [name for name in names if name.count(".") > 1] if line.startswith(" ") else names


def is_there(dotted: str) -> bool:
    """Whether it is a module, a key, or something that a module defines or hands on."""
    if dotted in modules() or dotted in keys_of_trainer():
        return True
    module = dotted
    while module not in modules():
        module = module.rpartition(".")[0]
    name = dotted.removeprefix(f"{module}.")
    path = modules()[module]
    handed_on = {imported.rpartition(".")[2] for imported, _ in imports_of_file(path)}
    return name in defined_in(path) or name in handed_on


def test_every_module_that_a_docstring_or_comment_names_is_there() -> None:
    missing, num_names = [], 0
    for path in modules().values():
        for line, text in documentation(path):
            names = named_in(text)
            num_names += len(names)
            wrong = [name for name in names if not is_there(name)]
            missing += [f"{path.relative_to(ROOT)}:{line} {name}" for name in wrong]
    assert missing == []
    assert num_names > 150
