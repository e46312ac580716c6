"""The modules of the three packages and their imports, read from their source.

An import has one of three kinds: it runs when the module is imported, only for type checkers
(`if TYPE_CHECKING`), or inside a function when that is called.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT

PACKAGES = ("verl_like", "workers", "trainer")
AT_IMPORT, FOR_TYPES, IN_FUNCTION = "at import", "for types", "in a function"


@dataclass(frozen=True)
class Import:
    """One imported module of one import statement."""

    importer: str
    imported: str
    kind: str


def sources(package: str) -> list[Path]:
    """Return the Python files of a package."""
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return `workers.roles.actor` for `workers/roles/actor.py`; for a package, its name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Return (dotted name, kind) of all imports of a file; for `from a import b` it is `a.b`."""
    pending = [(tree, AT_IMPORT)]
    while pending:
        node, kind = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, kind
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the whole path"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", kind
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kind = IN_FUNCTION
        if isinstance(node, ast.expr):  # holds no statement
            continue
        is_type_block = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            in_block = is_type_block and child in node.body and kind == AT_IMPORT
            pending.append((child, FOR_TYPES if in_block else kind))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which nobody changes."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of_file(path: Path) -> list[tuple[str, str]]:
    return list(imported_names(parsed(path)))


@functools.cache
def all_imports() -> tuple[Import, ...]:
    """Return the imports between modules of the three packages."""
    paths = {module_name(path): path for package in PACKAGES for path in sources(package)}
    edges = {}
    for importer, path in paths.items():
        for name, kind in imports_of_file(path):
            imported = name if name in paths else name.rpartition(".")[0]
            if imported in paths:
                edges[Import(importer, imported, kind)] = None
    return tuple(edges)


def cycles(imports: Iterable[Import]) -> list[list[str]]:
    """Return the sets of modules that import each other."""
    followers: dict[str, list[str]] = {}
    for edge in imports:
        followers.setdefault(edge.importer, []).append(edge.imported)
        followers.setdefault(edge.imported, [])
    reach = {module: _reachable(module, followers) for module in followers}
    rings = set()
    for module in followers:
        ring = [other for other in reach[module] if module in reach[other]]
        if ring:
            rings.add(tuple(sorted(ring)))
    return [list(ring) for ring in sorted(rings)]


def _reachable(start: str, followers: dict[str, list[str]]) -> set[str]:
    """Return the modules that a module imports, directly or indirectly."""
    seen: set[str] = set()
    pending = list(followers[start])
    while pending:
        module = pending.pop()
        if module not in seen:
            seen.add(module)
            pending += followers[module]
    return seen
