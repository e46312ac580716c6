"""The notebook runs from its first cell to its last, learns, and shows its steps in a bar."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import load
from tests.examples.scripts import EXAMPLES
from tests.integration.runs import lines

NOTEBOOK = EXAMPLES / "notebook" / "sft_then_grpo.ipynb"
LINES_OF_TRL = 16
"""Lines of code for the same with TRL's SFTTrainer and GRPOTrainer."""


def read() -> Any:
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_has_no_more_code_than_with_trl() -> None:
    cells = [cell for cell in read().cells if cell.cell_type == "code" and cell.id != "install"]
    code = [line for cell in cells for line in cell.source.splitlines() if line.strip()]
    assert len(code) <= LINES_OF_TRL
    assert max(map(len, code)) <= 100


def test_the_first_cell_installs_the_package_only_if_it_is_missing(tmp_path: Path) -> None:
    cell = next(cell for cell in read().cells if cell.cell_type == "code")
    command = cell.source.removeprefix("!")
    (tmp_path / "verl_like-1-py3-none-any.whl").touch()
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\necho "$@" >>calls\ntest "$1" = install -o -e installed\n')
    pip.chmod(0o755)
    for _ in range(2):
        subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, env={"PATH": "."}, check=True)
        (tmp_path / "installed").touch()
    show, install, show_again = (tmp_path / "calls").read_text().splitlines()
    assert show == show_again == "show -q verl-like"
    assert install == "install -q verl_like-1-py3-none-any.whl"


def test_the_page_shows_the_notebook_with_its_outputs() -> None:
    script = load("docs/make_notebook.py")
    assert script.PAGE.read_text(encoding="utf-8") == script.page_of(read())
    assert sum(bool(cell.get("outputs")) for cell in read().cells) >= 4


def text_of(outputs: Any, stream: str) -> str:
    return "".join(output.text for output in outputs if output.get("name") == stream)


@pytest.mark.long
@pytest.mark.example
def test_the_notebook_learns_and_shows_a_bar(tmp_path: Path) -> None:
    from nbclient import NotebookClient

    notebook = read()
    (grpo,) = [cell for cell in notebook.cells if cell.id == "grpo"]
    grpo.source = grpo.source.replace("steps=50", "steps=35")
    where = {"metadata": {"path": str(tmp_path)}}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where)
    client.execute(env={**os.environ, "PATH": path})
    outputs = {cell.id: cell.get("outputs", []) for cell in notebook.cells}

    for cell, last in (("sft", "30/30 |"), ("grpo", "35/35 |")):
        assert last in text_of(outputs[cell], "stderr")
        assert not re.search(r"^step \d", text_of(outputs[cell], "stdout"), re.M)
    assert re.search(r"^reward .* \(first -> last step\)", text_of(outputs["grpo"], "stdout"), re.M)
    assert outputs["plot"][-1].data["text/html"].count("<svg") == 2

    steps = lines(tmp_path / "runs" / "verl_like" / "ppo-1")
    scores = [step["critic/score/mean"] for step in steps]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.3
    assert "<assistant>5<eos>" in text_of(outputs["chat"], "stdout")
