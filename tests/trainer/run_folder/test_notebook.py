"""The display of a run in a notebook. `tests/examples/test_notebook.py` runs a real one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.trainer.run_folder.test_tracking import STEP, config
from trainer.ppo import PPOTrainer
from trainer.run_folder import notebook
from trainer.run_folder.notebook import NotebookConsole
from trainer.run_folder.tracking import make_tracking


class Shown:
    """IPython's `display`, and the handle that it returns."""

    def __init__(self) -> None:
        self.pages: list[tuple[str, str]] = []

    def display(self, shown: Any, display_id: bool) -> Shown:
        assert display_id
        assert not self.pages, "there is one display"
        self.update(shown)
        return self

    def update(self, shown: Any) -> None:
        self.pages.append((repr(shown), shown._repr_html_()))


def kernel(monkeypatch: pytest.MonkeyPatch, shell: object) -> Shown:
    """Simulate a process in which IPython runs this shell."""
    shown, ipython, display = Shown(), ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython)["get_ipython"] = lambda: shell
    vars(display)["display"] = shown.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_one_display_is_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shown = kernel(monkeypatch, SimpleNamespace(kernel=object()))
    monkeypatch.setattr(notebook, "REFRESH_S", 0.0)
    with make_tracking(config(tmp_path, "console"), 3, PPOTrainer.headline) as tracking:
        tracking.log({"val-core/s/reward/mean@1": 0.125}, 0)
        for step in (1, 2, 3):
            tracking.log({**STEP, "critic/score/mean": step / 4}, step)
    assert capsys.readouterr().out == ""
    assert len(shown.pages) == 5, "four lines, and the last one again at the end"
    text, html = shown.pages[-1]
    assert text.startswith("step 3/3  val-core/s/reward/mean@1 0.125  reward 0.75")
    assert '<progress value="3" max="3">' in html
    row = re.search('<tr><td>reward</td><td><svg.*?points="(.*?)".*?</td><td>0.75</td>', html)
    assert row is not None
    assert row[1] == "0.0,26.0 120.0,14.0 240.0,2.0"
    assert " left<" in shown.pages[2][1]
    assert " left<" not in html


def test_fast_steps_refresh_the_display_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = kernel(monkeypatch, SimpleNamespace(kernel=object()))
    monkeypatch.setattr(notebook, "REFRESH_S", 3600.0)
    monkeypatch.setattr(notebook.time, "monotonic", lambda: 5000.0)
    console = NotebookConsole(1000, lambda metrics: ["loss nan", "5 tokens/s", "no number"])
    for step in range(1, 1001):
        console.write({}, step)
    console.close()
    assert [text for text, _ in shown.pages] == [
        "step 1/1000  loss nan  tokens/s 5",
        "step 1000/1000  loss nan  tokens/s 5",
    ]
    assert shown.pages[-1][1].count(",") < 300, "no more points than pixels"
