"""`pyproject.toml` declares every package that the code imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = ("verl_like", "workers", "trainer")
NEVER_INSTALLED = ("_typeshed", "IPython")
"""Packages for type checkers alone, and those of a notebook that is already running."""


def imported(file: Path) -> set[str]:
    """Return the top-level names of all imports of a file."""
    names = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_every_imported_package_is_declared() -> None:
    lines = [*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    files = [file for folder in OURS for file in (ROOT / folder).rglob("*.py")]
    others = set().union(*map(imported, files)) - {
        *OURS,
        *NEVER_INSTALLED,
        *sys.stdlib_module_names,
    }
    distributions = packages_distributions()
    packages = {name: distributions.get(name, [name]) for name in others}
    missing = {
        name
        for name, found in packages.items()
        if not declared & {canonicalize_name(package) for package in found}
    }
    assert missing == set()


def test_the_install_script_has_the_declared_range_of_torch() -> None:
    (torch,) = [line for line in PROJECT["dependencies"] if line.startswith("torch")]
    script = (ROOT / "tools" / "install.sh").read_text()
    assert f'install_or_exit "{torch}"' in script
    low, high = re.findall(r"2\.(\d+)", torch)
    assert f"(2, {low}) <=" in script
    assert f"< (2, {high})" in script
