"""`tools/install.sh` names a missing requirement and the way out.

Python, pip and uv are stand-ins.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL = Path(__file__).resolve().parents[2] / "tools" / "install.sh"
STAND_IN = """#!/bin/bash
# A python: too old, without venv, or one that makes environments of stand-ins.
case "$*" in
    *version_info*) exit $OLD ;;
    "--version") echo "Python 3.8.1" ;;
    "-m venv"*) [ -z "$NO_VENV" ] || exit 1; mkdir -p .venv/bin; cp "$0" .venv/bin/python; exit 0 ;;
    "-m pip --version") [ ! -e .venv/no-pip ] ;;
    "-m pip install"*)
        echo "$@" >>pip.log
        [ -z "$NO_NETWORK" ] || { echo "ERROR: no match" >&2; exit 1; }
        ;;
    "-m uv"*) [ -n "$HAS_UV" ] || exit 1; echo "$@" >>uv.log ;;
    "-m pip config list") printf '%s\\n' "$PIP_SETTINGS" ;;
    *sha256*) echo 0123 ;;
    *find_spec*) [ -e pip.log ] || [ -e uv.log ] ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with only the script, the files that it reads, and a stand-in for every python."""
    shutil.copy(INSTALL, tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python"):
        path = tmp_path / "bin" / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
    return tmp_path


def install(project: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {
        "OLD": "0",
        "HOME": str(project),
        "PATH": f"{project}/bin:/usr/bin:/bin",
        **environment,
    }
    return subprocess.run(
        ["bash", "-euc", "source ./install.sh; install_project"],
        cwd=project,
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_bare_machine_gets_an_environment_after_a_note_about_the_download(project: Path) -> None:
    done = install(project)
    assert done.returncode == 0, done.stderr
    assert "450 MB to download" in done.stderr
    assert "install -qq --no-compile -e ." in (project / "pip.log").read_text()
    assert (project / ".venv" / "installed").is_file()


def test_pip_compiles_if_python_writes_no_bytecode(project: Path) -> None:
    done = install(project, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr
    assert "install -qq --compile -e ." in (project / "pip.log").read_text()


def test_uv_installs_from_the_indexes_of_pip(project: Path) -> None:
    extra = "extra-" + "index-url"
    settings = f"global.{extra}='https://a/b\\nfile:///b'\n:env:.find-links='/wheels'"
    done = install(project, HAS_UV="1", PIP_SETTINGS=f"{settings}\nglobal.timeout='9'")
    assert done.returncode == 0, done.stderr
    command = (project / "uv.log").read_text().splitlines()[-1]
    places = f"--{extra}=https://a/b --{extra}=file:///b --find-links=/wheels"
    assert command.endswith(f"--index-strategy unsafe-best-match {places} -e .")
    assert not (project / "pip.log").exists()


def test_a_second_call_installs_nothing(project: Path) -> None:
    install(project)
    (project / "pip.log").write_text("")
    done = install(project)
    assert done.returncode == 0
    assert done.stderr == ""
    assert (project / "pip.log").read_text() == ""


def test_an_incomplete_environment_is_created_again(project: Path) -> None:
    install(project)
    (project / ".venv" / "no-pip").touch()
    done = install(project)
    assert done.returncode == 0
    assert "incomplete" in done.stderr
    assert not (project / ".venv" / "no-pip").exists()


@pytest.mark.parametrize(
    ("variable", "texts"),
    [
        ("OLD", ["needs Python 3.11 or newer; found Python 3.8.1. Set PYTHON="]),
        ("NO_VENV", ["apt install python3-venv"]),
        ("NO_NETWORK", ["pip could not install torch", "PIP_FIND_LINKS"]),
    ],
)
def test_a_missing_requirement_is_named_with_the_way_out(
    project: Path, variable: str, texts: list[str]
) -> None:
    done = install(project, **{variable: "1"})
    assert done.returncode == 1
    assert all(text in done.stderr for text in texts), done.stderr
    assert not (project / ".venv" / "installed").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="df prints other columns elsewhere")
def test_a_full_disk_is_reported_before_the_download(project: Path) -> None:
    df = project / "bin" / "df"
    df.write_text("#!/bin/bash\necho head\necho dev 1 1 1000 1 /\n")
    df.chmod(0o755)
    done = install(project)
    assert done.returncode == 1
    assert "0 MB are free here, 2000 are needed" in done.stderr
    assert not os.path.exists(project / "pip.log")
