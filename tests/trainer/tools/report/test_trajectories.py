"""The report of a run whose samples have several turns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.tools.report.report_runs import environment_turn, make_played_run, policy_turn
from trainer.tools.report.page import summary, write_report
from trainer.tools.report.read import SAMPLED_STEPS, read_run
from trainer.tools.report.trajectories import (
    LONGEST_TURN,
    MAX_ROWS,
    MAX_TURNS,
    TRAJECTORIES_PER_STEP,
    outcomes_by_turns,
    trajectory_of,
)

EVIL = "<script>alert(1)</script>"


def played(num_turns: int, score: float = 0.0, problem: str | None = None) -> dict[str, Any]:
    turns = [policy_turn("a", 0.0) for _ in range(num_turns)]
    return {"turns": turns, "score": score, "problem": problem}


def test_a_trajectory_shows_turns_rewards_and_seconds(tmp_path: Path) -> None:
    page = write_report(make_played_run(tmp_path / "run")).read_text()
    assert page.count('<details class="trajectory"') == 5 * TRAJECTORIES_PER_STEP
    assert "4 turns, 8 tokens sampled, 12 observed, 0.16 s" in page
    assert 'title="engine 20.0 ms, environment 10.0 ms, waiting 10.0 ms"' in page
    assert '<div class="turn"><span class="soft">user</span><span class="text">no</span></div>' in (
        page
    )
    assert '<div class="turn drawn"><span class="soft">policy</span><span class="text">ok' in page
    assert "reward 0.833" in page


def test_texts_of_turns_are_escaped_and_cut(tmp_path: Path) -> None:
    folder = make_played_run(tmp_path / "run", 1, 1)
    long = f"{EVIL}{'x' * 9999}"
    turns = [policy_turn(long, 0.0), {**environment_turn(long), "role": EVIL}]
    row = {"turns": turns, "ended": EVIL}
    more = {"problem": long, "input": long, "score": 1, "step": 1}
    (folder / "rollouts" / "1.jsonl").write_text(json.dumps(row | more))
    page = write_report(folder).read_text()
    assert EVIL not in page
    assert page.count("&lt;script&gt;") >= 6
    assert page.count(f"({len(long) - LONGEST_TURN} more characters)") == 3


def test_many_long_trajectories_give_a_small_page(tmp_path: Path) -> None:
    folder = make_played_run(tmp_path / "run", 1, 1)
    turns = [policy_turn("x" * 9999, 0.0), environment_turn("y" * 9999)] * 100
    lines = [json.dumps({"turns": turns, "score": n, "step": 1}) for n in range(8)]
    (folder / "rollouts" / "1.jsonl").write_text("\n".join(lines))
    path = write_report(folder)
    text = path.read_text()
    assert text.count('<div class="turn drawn">') == TRAJECTORIES_PER_STEP * MAX_TURNS / 2
    assert f"… {200 - MAX_TURNS} more" in text
    caps = (SAMPLED_STEPS, TRAJECTORIES_PER_STEP, MAX_TURNS, LONGEST_TURN)
    assert re.findall(r"\d+", text[text.index("This page shows at most") :])[:4] == [
        *map(str, caps)
    ]
    assert path.stat().st_size < 2**20


def test_outcomes_are_counted_by_number_of_turns() -> None:
    rows = [played(1, 1.0), played(1, 2.0), played(1, sum([0.1] * 10)), played(1, 0.95), played(1)]
    rows += [played(2, 0.0, "it raised"), {"score": 1.0}]
    assert outcomes_by_turns(rows) == {
        "1": {"success": 3, "partial reward": 1, "no success": 1},
        "2": {"environment failed": 1},
    }
    many = outcomes_by_turns([played(n, 1.0) for n in range(1, MAX_ROWS + 4)])
    assert list(many)[-1] == f"{MAX_ROWS + 1} or more"
    assert many[f"{MAX_ROWS + 1} or more"] == {"success": 3}


@pytest.mark.parametrize("turns", [None, 7, [], [7, {}], [{"role": "assistant", "reward": "x"}]])
def test_foreign_turns_are_read_without_rewards(turns: Any) -> None:
    trajectory = trajectory_of({"turns": turns, "ended": None})
    assert trajectory.longest == 0
    assert [turn.reward for turn in trajectory.turns] in ([], [None])


def test_the_summary_says_how_trajectories_ended_and_warns_of_call_errors(tmp_path: Path) -> None:
    folder = make_played_run(tmp_path / "run", 1)
    line = json.loads((folder / "metrics.jsonl").read_text())
    line |= {
        "agents/num_turns/mean": 3.0, "agents/engine_s/mean": 0.3, "agents/waiting_s/mean": 0.1,
        "agents/environment_s/mean": 0.6, "agents/ended/length": 0.25, "agents/num_calls/mean": 2.0,
        "agents/ended/terminated": 0.75, "agents/num_call_errors/mean": 1.5,
        "agents/ended/deadline": 0.0,
    }  # fmt: skip
    (folder / "metrics.jsonl").write_text(json.dumps(line))
    lines = summary(read_run(folder))
    assert (
        "a trajectory: 3 turns, 1 s (engine 30%, environment 60%, waiting 10%); "
        "ended: terminated 75%, length 25%" in lines
    )
    assert any(line.startswith("warning: 75% of the tool calls") for line in lines)
