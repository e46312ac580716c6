"""A release: its sdist and wheel, commands without the checkout, images, CI hosts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests import ROOT
from tests.import_graph import PACKAGES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
BUILD = "from setuptools import build_meta; build_meta.build_{kind}({out!r})"

PATTERNS = {"sdist": "*.tar.gz", "wheel": "*-none-any.whl", "editable": "*editable-*.whl"}
USE = """
from pathlib import Path

from verl_like import GRPO, SFT


def reward(response: str) -> float:
    return float(len(response))


run = GRPO("model", ["Hi"], reward, lr=1e-6, n=8)
result = run.fit(steps=2)
folder: Path = result.model_folder
score: float = result.metrics[-1]["critic/score/mean"]

GRPO("model", ["Hi"], reward, lr="fast")  # 1
GRPO("model", ["Hi"], reward, learning_rat=1e-6)  # 2
GRPO("model", ["Hi"], 3)  # 3
run.fit(step=2)  # 4
run.fitt()  # 5
result.metric  # 6
SFT("model", [{"text": "a"}], batch_size=[2])  # 7
number: int = result.model_folder  # 8
"""
"""A user's file, whose numbered lines have mistakes."""


def tracked(*folders: str) -> set[str]:
    done = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines())


def build(kind: str, source: Path, out: Path) -> Path:
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD.format(kind=kind, out=str(out))],
        cwd=source,
        check=True,
        capture_output=True,
    )
    return next(out.glob(PATTERNS[kind]))


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of the tracked files, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("release")
    for name in tracked():
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    sdist = build("sdist", folder / "tree", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    wheel = build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)
    return sdist, wheel


@pytest.mark.long
def test_the_wheel_has_exactly_the_files_of_the_packages(release: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(release[1]).namelist()
    assert {name for name in names if ".dist-info/" not in name} == tracked(*PACKAGES)


def test_the_sdist_has_the_files_of_tests_and_docs(release: tuple[Path, Path]) -> None:
    with tarfile.open(release[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = tracked("tests", "docs", "examples", "tools", *PACKAGES)
    assert needed <= names
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "SECURITY.md", "pyproject.toml"} <= names


def test_all_files_have_the_same_version(release: tuple[Path, Path]) -> None:
    version = PROJECT["version"]
    assert [path.name.split("-")[1].removesuffix(".tar.gz") for path in release] == [version] * 2
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_the_wheel_has_the_declared_extras(release: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(release[1]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("dist-info/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
    extras = PROJECT["optional-dependencies"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(extras)
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    count = len(PROJECT["dependencies"]) + sum(map(len, extras.values()))
    assert len(required) == count


@pytest.mark.long
def test_a_type_checker_finds_mistakes_in_a_file_outside_an_editable_install(
    release: tuple[Path, Path], tmp_path: Path
) -> None:
    source = release[0].parent / "tree"
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    shutil.unpack_archive(build("editable", source, tmp_path), site, "zip")
    assert [path.read_text().strip() for path in site.glob("*.pth")] == [str(source)]

    (tmp_path / "use.py").write_text(USE)
    options = ["--outputjson", "--level", "error", "--pythonpath", environment / "bin" / "python"]
    checker = [Path(sys.executable).with_name("basedpyright"), *options, "use.py"]
    done = subprocess.run(checker, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = json.loads(done.stdout)["generalDiagnostics"]
    mistakes = {number for number, line in enumerate(USE.splitlines()) if "  # " in line}
    assert {error["range"]["start"]["line"] for error in errors} == mistakes, errors


@pytest.fixture(scope="module")
def installed(release: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.unpack_archive(release[1], folder, "zip")
    return folder


def run(installed: Path, folder: Path, *command: str) -> str:
    """Return a command's output in an installation of the wheel, outside the checkout."""
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.example
def test_the_commands_in_the_help_of_make_tiny_run_from_the_wheel(
    installed: Path, tmp_path: Path
) -> None:
    from trainer.cli import make_tiny

    commands = str(make_tiny.__doc__).partition("  verl-like")[2].partition("\n\n")[0]
    code = "import trainer; print(trainer.__file__); from trainer.cli.main import main; main()"
    script = f'verl-like() {{ "$PY" -c "{code}" "$@"; }}\n'
    script += "verl-like" + commands.replace("training_steps=20", "training_steps=1")
    out = run(installed, tmp_path, "bash", "-euc", f"PY={sys.executable}\n{script}")
    assert out.startswith(f"{installed}/trainer/__init__.py")
    assert "step 1/1" in out


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_images_pass_the_linter_and_copy_existing_files(name: str) -> None:
    file = ROOT / "docker" / f"{name}.Dockerfile"
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, file], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for copied in re.findall(r"^COPY (.+) \S+$", file.read_text(), re.M):
        assert all((ROOT / source).exists() for source in copied.split())
    extras = {
        e for names in re.findall(r'"?\.\[([\w,-]+)\]', file.read_text()) for e in names.split(",")
    }
    assert extras
    assert extras <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("path", [".github/workflows/ci.yml", ".gitlab-ci.yml"])
def test_ci_hosts_call_only_the_ci_script(path: str) -> None:
    assert "bash .ci/run" in str(yaml.safe_load((ROOT / path).read_text()))
