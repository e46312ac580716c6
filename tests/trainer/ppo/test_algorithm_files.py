"""An algorithm's file has its function, registered by name, and nothing else that is public."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import trainer.ppo.advantages  # noqa: F401
import workers.losses.preference  # noqa: F401
from tests.import_graph import module_name, parsed, sources
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from workers.losses.preference.registry import PREFERENCE_LOSSES
from workers.losses.registry import POLICY_LOSSES

FOLDERS = [
    ("trainer/ppo/advantages", "ADVANTAGE_ESTIMATORS", ADVANTAGE_ESTIMATORS),
    ("workers/losses", "POLICY_LOSSES", POLICY_LOSSES),
    ("workers/losses/preference", "PREFERENCE_LOSSES", PREFERENCE_LOSSES),
]


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Return the functions, classes, constants and types that a file defines at its top."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (ast.unparse(target) for target in targets)


def registered_names(tree: ast.Module, registry: str) -> list[str]:
    """Return the functions under `@REGISTRY.register(...)`."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = []
    for function in functions:
        decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
        if any(text.startswith(f"{registry}.register(") for text in decorators):
            found.append(function.name)
    return found


@pytest.mark.parametrize(
    ("folder", "registry", "entries"), FOLDERS, ids=[registry for _, registry, _ in FOLDERS]
)
def test_an_algorithms_file_has_one_public_name_its_registered_function(
    folder: str, registry: str, entries: Mapping[str, Any]
) -> None:
    public: dict[str, list[str]] = {}
    expected: dict[str, list[str]] = {}
    for path in sources(folder):
        registered = registered_names(parsed(path), registry)
        if registered:
            module = module_name(path)
            public[module] = [name for name in defined_names(parsed(path)) if name[0] != "_"]
            expected[module] = registered[:1]
    assert public == expected

    package = folder.replace("/", ".")
    modules = {entry.__module__ for entry in entries.values()}
    assert {name for name in modules if name.startswith(f"{package}.")} == set(public)
