"""The part of the report about makers and trainers."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.trainer.report.report_runs import make_run
from trainer.detached.activity import Activity
from trainer.report.detached import speeds
from trainer.report.detached_figures import histogram
from trainer.report.page import write_report
from trainer.report.read import read_run

pytestmark = pytest.mark.usefixtures("figures")
FIGURES = ["Activity", "Lanes", "Staleness", "Versions", "Queue", "Tokens a second"]


@pytest.fixture(autouse=True)
def no_other_figures(figures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PPO's own take most of the time."""
    for drawing in ("curves", "timeline", "shares"):
        monkeypatch.setattr(f"trainer.report.figures.{drawing}", lambda *_: "")


LEDGER = {
    "makers": {
        "0": {"made": 64, "trained": 48, "queued": 8, "dropped": {"x": 3, "y": 1}, "in_flight": 4},
        "1": {"made": 32, "trained": 32, "queued": 0, "dropped": {}, "in_flight": 0},
    },
    "trainers": {"0": 80},
    "staleness": {"0": 16, "1": 64},
    "versions": {"0": 32, "1": 32, "2": 16},
}  # fmt: skip


def detached_metrics(step: int) -> dict[str, float]:
    """A step of 1 s, for a quarter of which maker 0 generated."""
    return {
        "detached/queue_depth": step % 4,
        "detached/staleness/0": 1, "detached/staleness/1": 7,
        "detached/maker_0/busy_s": 0.25, "detached/maker_0/waiting_s": 0.5,
        "detached/maker_0/syncing_s": 0.25,
        "detached/trainer/busy_s": 0.5, "detached/trainer/waiting_s": 0.5,
        "detached/trainer/syncing_s": 0.0,
        "perf/total_num_tokens": 800, "detached/drawn_tokens": 900,
    }  # fmt: skip


def make_detached_run(folder: Path, num_steps: int, has_ended: bool = True) -> Path:
    make_run(folder, num_steps, samples=2)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line | detached_metrics(line["step"]) for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if has_ended:
        facts = activity_of(num_steps).as_json() | {"ledger": LEDGER}
        (folder / "detached.json").write_text(json.dumps(facts))
    return folder


def activity_of(num_steps: int) -> Activity:
    """A maker that generates and then syncs, and a trainer."""
    now = [0.0]
    activity = Activity(lambda: now[0])
    for step in range(num_steps):
        with activity.of("maker <b>").busy("generate"), activity.of("trainer").busy("train"):
            now[0] += 0.6
        with activity.of("maker <b>").syncing(f"weights of version {step}"):
            now[0] += 0.4
    return activity


def figures_of(folder: Path) -> list[str]:
    return re.findall(r'data-figure="([^"]+)"', write_report(folder).read_text())


def test_a_detached_run_has_its_figures_and_books(tmp_path: Path) -> None:
    folder = make_detached_run(tmp_path / "run", 8)
    assert [name for name in figures_of(folder) if name in FIGURES] == FIGURES
    page = (folder / "report.html").read_text()
    assert "<td>maker 0</td>" in page
    books = re.search(r'id="books".*?</table>', page, re.DOTALL)
    assert books is not None
    cells = re.findall(r"<t[dh][^>]*>([^<]*)<", books[0])
    assert cells[:6] == ["samples", "made", "trained", "queued", "dropped", "in flight"]
    assert cells[6:12] == ["maker 0", "64", "48", "8", "4", "4"]
    assert cells[-6:] == ["all", "96", "80", "8", "4", "4"]
    assert "<title>maker &lt;b&gt;: syncing, weights of version 7, 0.4 s</title>" in page
    assert "weights of version 1," not in page  # before the last three steps
    assert "<b>:" not in page


def test_a_run_that_goes_on_has_what_its_steps_say(tmp_path: Path) -> None:
    folder = make_detached_run(tmp_path / "run", 4, has_ended=False)
    run = read_run(folder).detached
    assert run is not None
    assert run.seconds["maker 0"] == {"busy": 1.0, "waiting": 2.0, "syncing": 1.0}
    assert run.staleness == {0: 4, 1: 28}
    assert [name for name in figures_of(folder) if name in FIGURES] == [
        "Activity",
        "Staleness",
        "Queue",
        "Tokens a second",
    ]


def test_tokens_a_second_are_those_of_busy_time() -> None:
    (rates,) = speeds([{"step": 1, **detached_metrics(1)}])
    assert rates == {"step": 1, "a maker": 900 / 0.25, "the trainer": 800 / 0.5}


def test_another_run_has_no_part_about_makers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 2)
    assert read_run(folder).detached is None
    assert not {*FIGURES} & {*figures_of(folder)}
    assert "Makers and trainers" not in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    "content",
    [
        '{"activity": {"maker 0": {"bu',
        "[1]",
        '{"activity": {"maker 0": 3}, "ledger": {"makers": {"0": []}, "staleness": {"x": "y"}}}',
        '{"activity": {"maker 0": {"busy": NaN}}, "intervals": {"maker 0": [[1], 2]}}',
        '{"ledger": {"versions": {"0": -1}, "makers": 3}, "intervals": [1]}',
    ],
)
def test_what_is_not_ours_in_detached_json_is_left_out(tmp_path: Path, content: str) -> None:
    folder = make_detached_run(tmp_path / "run", 2, has_ended=False)
    (folder / "detached.json").write_text(content)
    assert "Activity" in figures_of(folder)  # from the steps


def test_many_versions_stand_together_in_ranges() -> None:
    svg = histogram({version: 4 for version in range(200_000)}, "version")
    assert svg.count("<path") < 200


def test_ten_thousand_steps_are_drawn_in_seconds(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1, samples=2)
    lines = [{"step": step, **detached_metrics(step)} for step in range(1, 10_001)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "detached.json").write_text(json.dumps(activity_of(10_000).as_json()))
    began = time.process_time()
    path = write_report(folder)
    assert time.process_time() - began < 5
    assert path.stat().st_size < 1e6
