"""An editor's type checker finds no mistake in the code of the docs and the examples."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.test_docs import BLOCK

NOT_INSTALLED = ("dspy", "langchain_openai", "litellm", "mlflow", "smolagents", "tinker", "trl")
"""Packages of which the pages show the use, and that the tests do not install."""


def write_blocks(page: Path, folder: Path) -> None:
    """Write a page's blocks to one module, but a block that begins with `# name.py` to its own."""
    text = page.read_text(encoding="utf-8")
    modules: dict[str, str] = {}
    for match in BLOCK.finditer(text):
        if "no-run" not in match["info"]:
            named = re.match(r"# (\w+)\.py\b", match["code"])
            module = named[1] if named else page.stem
            code = modules.get(module, "")
            line = text.count("\n", 0, match.start("code"))
            modules[module] = code + "\n" * (line - code.count("\n")) + match["code"]
    for module, code in modules.items():
        path = folder / page.stem / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")


@pytest.mark.long
def test_the_code_of_pages_and_examples_has_the_types_that_an_editor_expects(
    tmp_path: Path,
) -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        write_blocks(page, tmp_path / "docs")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    command = [Path(sys.executable).with_name("basedpyright"), "--outputjson"]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    result = json.loads(done.stdout)
    assert result["summary"]["filesAnalyzed"] >= 50, done.stdout
    errors = [
        f"{error['file']}:{error['range']['start']['line'] + 1}: {error['message']}"
        for error in result["generalDiagnostics"]
        if error.get("rule") != "reportMissingImports" or not named_by(error["message"])
    ]
    assert errors == []


def named_by(message: str) -> bool:
    """Return whether the message is about a package that the tests do not install."""
    return any(f'"{name}' in message for name in NOT_INSTALLED)
