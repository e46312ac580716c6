"""`pyproject.toml` declares every package that the code imports."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT
from tests.import_graph import PACKAGES, imports_of_file, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEVER_INSTALLED = ("_typeshed",)
"""Packages only for type checkers."""
NOT_EVERYWHERE = {"gem": ["gem-llm"]}
"""Package -> its distribution, which `tests/run.sh` installs only where there is a C compiler."""


def test_every_imported_package_is_declared() -> None:
    lines = [*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    files = [file for package in PACKAGES for file in sources(package)]
    names = {name.partition(".")[0] for file in files for name, _ in imports_of_file(file)}
    others = names - {*PACKAGES, *NEVER_INSTALLED, *sys.stdlib_module_names}
    distributions = NOT_EVERYWHERE | packages_distributions()
    missing = {
        name
        for name in others
        if not declared & set(map(canonicalize_name, distributions.get(name, [name])))
    }
    assert missing == set()


def test_the_install_script_has_the_declared_range_of_torch() -> None:
    (torch,) = [line for line in PROJECT["dependencies"] if line.startswith("torch")]
    script = (ROOT / "tools" / "install.sh").read_text()
    assert f'install_or_exit "{torch}"' in script
    low, high = re.findall(r"2\.(\d+)", torch)
    assert f"(2, {low}) <=" in script
    assert f"< (2, {high})" in script
