"""Lists of the Python API: names of `docs/data/api.yaml`, signatures and first sentences."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from verl_like import Worker
from verl_like.calls.future import WorkerFuture
from verl_like.config_key import Section
from verl_like.extend import CheckpointMixin, Trainer
from verl_like.lazy import names_by_block

DATA = Path(__file__).resolve().parent / "data" / "api.yaml"
PAGES: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
"""Page -> section -> dotted path -> members that the site shows."""


def name_list(page: str, section: str) -> str:
    """Return the signature and a sentence of each name of a section, and of its listed methods."""
    rows = []
    for path, members in PAGES[page][section].items():
        for name, text in rows_of(path, members):
            rows.append(f"`{name}`  \n{first_sentence(text)}")
    return "\n\n".join(rows)


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
    yield name if members == "docstring" else called(name, target), text
    methods = members if isinstance(members, list) else []
    if isinstance(members, dict) and "filters" in members:
        methods = [name for name in vars(target) if re.search(members["filters"][0], name)]
    for member in (member for member in methods if hasattr(target, member)):
        value = inspect.getattr_static(target, member)
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        yield called(f"{name}.{member}", value), docstring(value)


def called(name: str, target: Any) -> str:
    """Return a name; of a function, a method or a class with the parameters that fit a line."""
    if not inspect.isfunction(target) and not inspect.isclass(target) or has_no_parameters(target):
        return name
    signature = inspect.signature(target)
    line, end = f"{name}(", ")"
    if inspect.isfunction(target) and signature.return_annotation not in ("None", "Any"):
        end = f") -> {signature.return_annotation}"
    shown = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    for number, parameter in enumerate(shown):
        text = ", " * bool(number) + described(parameter)
        rest = ", …" if number + 1 < len(shown) else ""
        if len(f"{line}{text}{rest}{end}") > LONGEST_LINE:
            return f"{line}{', ' * bool(number)}…{end}"
        line += text
    return f"{line}{end}"


LONGEST_LINE = 82
"""Columns of the longest signature; further parameters are three dots."""


def has_no_parameters(target: Any) -> bool:
    """Return whether users do not construct the class, or its parameters are keys of a section."""
    return inspect.isclass(target) and issubclass(
        target,
        BaseException | enum.Enum | Section | Trainer | Worker | WorkerFuture | CheckpointMixin,
    )


def described(parameter: inspect.Parameter) -> str:
    """Return a parameter with its type and its default."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    annotation = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)
    kind = "" if annotation in ("Any", parameter.empty) else f": {annotation}"
    if kind.count("|") > 2 and "[" not in kind.partition("|")[0]:
        kind = f"{kind.partition(' |')[0]} | …"
    text = f"{stars.get(parameter.kind, '')}{parameter.name}{kind}"
    if parameter.default is parameter.empty:
        return text
    is_plain = isinstance(parameter.default, int | float | str | tuple | None)
    return f"{text}{' = ' if kind else '='}{parameter.default!r}" if is_plain else f"{text} = …"


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
    """Return the first sentence of a docstring, without a colon at its end."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0].rstrip(":")
