"""The names that the packages export and the docs use exist, are sorted, and can be imported."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from tests import ROOT
from tests.import_graph import PACKAGES

DOCUMENTED = (
    "trainer.PPOConfig",
    "trainer.PPOTrainer",
    "trainer.load_config",
    "trainer.main_ppo",
    "trainer.ppo.PPOTrainer",
    "trainer.run",
)


def find(path: str) -> object:
    """Return the module or the object at a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        package, _, name = path.rpartition(".")
        if not package or not path.startswith(f"{error.name}"):
            raise
        return getattr(find(package), name)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_sorted_and_exist(package: str) -> None:
    module = importlib.import_module(package)
    names = list(module.__all__)
    assert names == sorted(names)
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_documented_path_can_be_imported(path: str) -> None:
    assert find(path) is not None


def test_the_trainer_is_one_class_by_every_path() -> None:
    assert find("trainer.ppo.PPOTrainer") is find("trainer.PPOTrainer")


def test_a_module_and_a_function_of_one_package_keep_their_kinds() -> None:
    assert callable(find("trainer.run"))
    assert callable(find("trainer.load_config"))
    assert callable(find("trainer.main_ppo").main)


def interface() -> str:
    """The pages of the Python API."""
    pages = [ROOT / "docs" / f"api_{package}.md" for package in PACKAGES]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def test_the_pages_of_the_interface_have_names_of_verl_like_only() -> None:
    paths = set(re.findall(r"^::: (\S+)$", interface(), re.M))
    others = {path for path in paths if not path.startswith("verl_like.")}
    assert others == {"workers.rewards.code.run_tests"}, "settings name it by this path"


def test_every_path_on_the_pages_of_the_interface_can_be_imported() -> None:
    paths = re.findall(r"^::: (\S+)$", interface(), re.M)
    assert len(paths) >= 15
    assert [path for path in paths if find(path) is None] == []


def test_every_name_that_a_page_imports_is_on_a_page_of_the_interface() -> None:
    documented = set(re.findall(r"^::: verl_like\.(\w+)$", interface(), re.M))
    errors = set(vars(find("verl_like.errors")))  # the page shows the whole module
    imported = set[str]()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for names in re.findall(r"^\s*from verl_like import ([\w, ]+)$", text, re.M):
            imported |= {name.strip() for name in names.split(",")}
    assert len(imported) >= 20
    assert imported - documented - errors == set()


def documented() -> set[str]:
    """Return the names on the page of the interface."""
    return {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", interface(), re.M)}


def test_the_pages_of_the_interface_have_every_name_that_the_docs_import() -> None:
    imported, modules = set[str](), set[str]()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module:
                    if node.module.split(".")[0] in PACKAGES:
                        modules.add(node.module)
                        imported |= {alias.name for alias in node.names}
    errors = {name for name in imported if hasattr(find("verl_like.errors"), name)}
    assert modules == {"verl_like"}
    assert imported - documented() - errors == set()


def test_the_pages_of_the_interface_have_every_name_of_verl_like() -> None:
    names = set(find("verl_like").__all__)
    errors = {name for name in names if hasattr(find("verl_like.errors"), name)}
    assert names - documented() - errors == set()
