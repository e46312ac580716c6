"""A file of the user that hides one of our packages is named, from every entry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

GRPO, ROLE = "from verl_like import GRPO", "from verl_like.extend import ScoreTrainEngine"
COMMAND = "from verl_like import main; main()"


@pytest.mark.parametrize(
    ("hiding", "code"),
    [
        ("trainer.py", GRPO),
        ("trainer/__init__.py", GRPO),
        ("workers.py", GRPO),
        ("workers.py", ROLE),
        ("trainer.py", COMMAND),
        ("workers/__init__.py", COMMAND),
    ],
)
def test_a_file_that_hides_a_package_is_named(hiding: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / hiding
    file.parent.mkdir(exist_ok=True)
    file.write_text("epochs = 3\n")
    script = tmp_path / "add.py"
    script.write_text(f"import sys; sys.path.append({str(ROOT)!r})\n{code}\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    shown = file.parent if file.name == "__init__.py" else file
    package = hiding.partition(".")[0].partition("/")[0]
    assert ended.stderr.splitlines()[-1].endswith(
        f"{shown} hides the package '{package}' of verl-like. Rename it, start Python in another "
        "folder, or uninstall what it belongs to."
    )


def test_other_import_errors_stay_as_they_are(tmp_path: Path) -> None:
    script = tmp_path / "add.py"
    code = "import sys; sys.modules['numpy'] = None\nfrom verl_like import DataProto\n"
    script.write_text(f"import sys; sys.path.append({str(ROOT)!r})\n{code}")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert "import of numpy halted" in ended.stderr.splitlines()[-1]
