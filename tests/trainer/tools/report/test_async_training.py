"""The part of the report about generators and trainers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.trainer.tools.report.report_runs import make_run
from trainer.run_folder.accounts import seconds_by_role
from trainer.tools.report.page import write_report
from trainer.tools.report.read import read_run

pytestmark = pytest.mark.usefixtures("figures")
FIGURES = ["Staleness", "Queue", "Activity"]
LEDGER = {
    "generators": {
        "0": {"made": 64, "trained": 48, "queued": 8, "dropped": {"x": 3, "y": 1}, "in_flight": 4},
        "1": {"made": 32, "trained": 32, "queued": 0, "dropped": {}, "in_flight": 0},
    },
    "trainers": {"0": 80},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_other_figures(figures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop PPO's own figures, which take most of the time."""
    for drawing in ("timeline", "shares"):
        monkeypatch.setattr(f"trainer.tools.report.figures.{drawing}", lambda *_: "")


def async_metrics(step: int) -> dict[str, float]:
    """Return a step of 1 s, for a quarter of which generator 0 generated."""
    return {
        "async/queue_depth": step % 4,
        "async/staleness/mean": 0.5, "async/staleness/max": 1,
        "async/generator_0/busy_s": 0.25, "async/generator_0/waiting_s": 0.5,
        "async/generator_0/syncing_s": 0.25,
        "async/trainer/busy_s": 0.5, "async/trainer/waiting_s": 0.5,
        "async/trainer/syncing_s": 0.0,
    }  # fmt: skip


def make_async_run(folder: Path, num_steps: int, has_ended: bool = True) -> Path:
    make_run(folder, num_steps, samples=2)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line | async_metrics(line["step"]) for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if has_ended:
        (folder / "async.json").write_text(json.dumps({"ledger": LEDGER}))
    return folder


def figures_of(folder: Path) -> list[str]:
    titles = re.findall(r'data-figure="([^"]+)"', write_report(folder).read_text())
    return [name for name in titles if name in FIGURES]


def test_an_async_run_has_its_figures_and_ledger(tmp_path: Path) -> None:
    folder = make_async_run(tmp_path / "run", 8)
    assert figures_of(folder) == FIGURES
    page = (folder / "report.html").read_text()
    ledger = re.search(r'id="ledger".*?</table>', page, re.DOTALL)
    assert ledger is not None
    cells = re.findall(r"<t[dh][^>]*>([^<]*)<", ledger[0])
    assert cells[:6] == ["samples", "generated", "trained", "queued", "dropped", "in flight"]
    assert cells[6:12] == ["generator 0", "64", "48", "8", "4", "4"]
    assert cells[-6:] == ["all", "96", "80", "8", "4", "4"]


def test_an_unfinished_run_has_the_seconds_of_its_steps(tmp_path: Path) -> None:
    folder = make_async_run(tmp_path / "run", 4, has_ended=False)
    seconds = seconds_by_role(read_run(folder).metrics)
    assert seconds["generator 0"] == {"busy": 1.0, "waiting": 2.0, "syncing": 1.0}


@pytest.mark.parametrize(
    "content",
    ['{"ledger": {"generators": {"bu', "[1]", '{"ledger": {"generators": 3}}',
     '{"ledger": {"generators": {"0": []}}}'],
)  # fmt: skip
def test_foreign_content_of_async_json_is_ignored(tmp_path: Path, content: str) -> None:
    folder = make_async_run(tmp_path / "run", 2, has_ended=False)
    (folder / "async.json").write_text(content)
    assert read_run(folder).ledger == []
