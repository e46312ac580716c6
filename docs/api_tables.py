"""Tables of the Python API: every name of `docs/data/api.yaml` with a sentence of its docstring."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from verl_like.lazy import names_by_block

DATA = Path(__file__).resolve().parent / "data" / "api.yaml"
PAGES: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
"""Page -> section -> dotted path -> members that the site shows."""


def name_table(page: str, section: str) -> str:
    """Return a row for each name of a section, and for each method that it lists."""
    rows = ["Name|Meaning", "---|---"]
    for path, members in PAGES[page][section].items():
        rows += [f"`{name}`|{first_sentence(text)}" for name, text in rows_of(path, members)]
    return "\n".join(rows)


def rows_of(path: str, members: Any) -> Iterator[tuple[str, str]]:
    """Yield a name and its docstring, then its listed methods and properties with theirs."""
    module, _, name = path.rpartition(".")
    target = getattr(importlib.import_module(module), name)
    if isinstance(target, ModuleType):
        if members.get("members", True):
            classes = [value for value in vars(target).values() if inspect.isclass(value)]
            classes = [each for each in classes if each.__module__ == path]
            yield from ((each.__name__, docstring(each)) for each in classes)
        return
    is_documented = inspect.isclass(target) or inspect.isroutine(target)
    text = docstring(target) if is_documented else docstring_of_constant(module, name)
    yield called(name, target), text
    methods = members if isinstance(members, list) else []
    for member in (member for member in methods if hasattr(target, member)):
        value = inspect.getattr_static(target, member)
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        yield called(f"{name}.{member}", value), docstring(value)


def called(name: str, target: Any) -> str:
    """Return a name, of a function or a method with its parameters."""
    if not inspect.isfunction(target):
        return name
    parameters = [each.name for each in inspect.signature(target).parameters.values()]
    shown = [parameter for parameter in parameters if parameter not in ("self", "cls")]
    if len(shown) > MOST_PARAMETERS:
        shown = [*shown[:MOST_PARAMETERS], "…"]
    return f"{name}({', '.join(shown)})"


MOST_PARAMETERS = 4
"""Parameters that a table shows of a function."""


def docstring(target: Any) -> str:
    """Return the docstring of a class, function or property."""
    text = inspect.getdoc(target)
    assert text, f"{target} has no docstring"
    return text


def docstring_of_constant(module: str, name: str) -> str:
    """Return the text below the assignment of a name, in the module that defines it."""
    file = importlib.import_module(module).__file__
    assert file
    (defined_in,) = [block[name] for block in names_by_block(file) if name in block]
    file = importlib.import_module(defined_in).__file__
    assert file
    statements = ast.parse(Path(file).read_text(encoding="utf-8")).body
    for statement, after in zip(statements, statements[1:], strict=False):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if name in names and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return inspect.cleandoc(str(after.value.value))
    raise AssertionError(f"{name} of {defined_in} has no docstring")


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, as a cell of a table."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0].rstrip(":").replace("|", "\\|")
