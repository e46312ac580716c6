"""The imports of the three packages go one way, and the cheap ones stay cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BELOW = {"verl_like": set(), "workers": {"verl_like"}, "trainer": {"verl_like", "workers"}}
OPTIONAL = {"vllm", "flash_attn", "peft", "wandb"}


def imports(path: Path, everywhere: bool = True) -> set[str]:
    """Top-level names that a file imports: anywhere in it, or only while it is being imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if not everywhere and id(node) in lazy:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole path"
            found.add(str(node.module).split(".")[0])
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", BELOW)
def test_a_package_imports_only_packages_below_it(package: str) -> None:
    allowed = BELOW[package] | {package}
    wrong = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in sources(package)
        if (found := imports(path) & {*BELOW, "examples", "tests"} - allowed)
    }
    assert wrong == {}


def test_ray_is_imported_by_its_backend_alone() -> None:
    paths = [path for package in BELOW for path in sources(package)]
    importers = {path.relative_to(ROOT).as_posix() for path in paths if "ray" in imports(path)}
    assert {path for path in importers if not path.startswith("verl_like/backends/ray/")} == set()


def test_optional_packages_are_imported_when_they_are_chosen() -> None:
    paths = [path for package in BELOW for path in sources(package)]
    assert {
        str(path): found for path in paths if (found := imports(path, everywhere=False) & OPTIONAL)
    } == {}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("verl_like", ("ray", "transformers")),
        ("workers.config", ("ray", "transformers")),
        ("workers.rewards.functions", ("torch", "ray", "transformers")),
        ("workers.rewards.process", ("torch", "ray", "transformers")),
        ("trainer.cli.main", ("torch", "ray", "transformers", "hydra")),
        ("trainer.ppo.advantages", ("ray", "transformers", "tensordict")),
    ],
)
def test_an_import_does_not_load(module: str, absent: tuple[str, ...]) -> None:
    program = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
