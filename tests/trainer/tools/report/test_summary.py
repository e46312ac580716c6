"""The last lines of a run: where the time went, the best validation, warnings."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.tools.report.report_runs import make_run
from trainer.tools.report.page import advice_at_end, close_run, summary, write_report
from trainer.tools.report.read import RunData, read_run

STEP = {
    "timing_s/step": 2.0,
    "timing_s/sample": 1.2,
    "timing_s/update": 0.6,
    "actor/entropy": 2.0,
    "actor/grad_norm": 0.5,
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
}


def run_of(folder: Path, *lines: dict[str, float]) -> RunData:
    rows = [{"step": step, **line} for step, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = {"traceEvents": [], "otherData": {"stages": ["sample", "update"]}}
    (folder / "timeline.json").write_text(json.dumps(trace))
    return read_run(folder)


def test_the_summary_has_phase_times_and_the_best_validation(tmp_path: Path) -> None:
    scores = [0.25, 0.75, 0.5]
    lines = [STEP | {"val-core/x/mean@1": score} for score in scores]
    assert summary(run_of(tmp_path, *lines)) == [
        "3 steps, 2 s each: sample 60 %, update 30 %, other 10 %",
        "best val-core/x/mean@1: 0.75 after step 1, 0.5 at the end",
    ]


def test_the_stages_of_a_run_of_an_earlier_version_have_todays_names(tmp_path: Path) -> None:
    old = {"step": 1, "timing_s/step": 2.0, "timing_s/gen": 1.0, "timing_s/adv": 0.4}
    resumed = {"step": 2, "timing_s/step": 2.0, "timing_s/sample": 1.0, "timing_s/gen": 0.9}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(old)}\n{json.dumps(resumed)}\n")
    stages = ["gen", "score", "adv", "update", "update_weights"]
    trace = {"traceEvents": [], "otherData": {"stages": stages}}
    (tmp_path / "timeline.json").write_text(json.dumps(trace))
    (line, *_) = summary(read_run(tmp_path))
    assert line == "2 steps, 2 s each: sample 50 %, other 40 %, estimate 10 %"


def test_the_best_loss_of_a_validation_is_the_lowest(tmp_path: Path) -> None:
    lines = [STEP | {"val-core/rm/loss": loss} for loss in (0.7, 0.5, 0.6)]
    last = summary(run_of(tmp_path, *lines))[-1]
    assert last == "best val-core/rm/loss: 0.5 after step 1, 0.6 at the end"


def test_the_summary_has_the_first_and_last_reward_and_kl(tmp_path: Path) -> None:
    numbers = [
        {"critic/score/mean": score, "actor/reward_kl_penalty": 0.0, "actor/ppo_kl": score / 10}
        for score in (0.25, 0.9, 0.5)
    ]
    lines = summary(run_of(tmp_path, *[STEP | metrics for metrics in numbers]))
    assert lines[1] == "reward 0.25 -> 0.5, KL 0.025 -> 0.05 (first -> last step)"


def test_the_phase_percentages_add_up_to_100(tmp_path: Path) -> None:
    seconds = (0.667, 0.667, 0.666)
    stages = [f"s{number}" for number in range(len(seconds))]
    step = {f"timing_s/{stage}": spent for stage, spent in zip(stages, seconds, strict=True)}
    run = run_of(tmp_path, step | {"timing_s/step": 2.0})
    (line,) = summary(replace(run, stages=stages))
    assert sum(map(int, re.findall(r"(\d+) %", line))) == 100


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (
            {"response_length/clip_ratio": 0.5},
            "50% of the responses reach data.max_response_length",
        ),
        ({"actor/entropy": 0.01}, "the entropy fell from 2 to 0.01"),
        ({"actor/pg_clipfrac": 0.4}, "40% of the tokens are clipped in an update"),
        ({"actor/ppo_kl": -0.5}, "an update moves the policy by a KL of -0.5"),
    ],
)
def test_a_metric_beyond_its_limit_causes_a_warning(
    tmp_path: Path, numbers: dict[str, float], words: str
) -> None:
    (line,) = advice_at_end(run_of(tmp_path, *[STEP] * 6, *[STEP | numbers] * 6))
    assert line.startswith(f"warning: {words}")


def test_a_gspo_run_may_clip_many_tokens(tmp_path: Path) -> None:
    run = run_of(tmp_path, *[STEP | {"actor/pg_clipfrac": 0.4}] * 6)
    assert advice_at_end(replace(run, config="  policy_loss:\n    loss_mode: gspo\n")) == []


def test_a_falling_share_of_cut_responses_causes_no_warning(tmp_path: Path) -> None:
    cut = [{"response_length/clip_ratio": share} for share in (0.9, 0.4)]
    assert advice_at_end(run_of(tmp_path, *[STEP | cut[0]] * 6, *[STEP | cut[1]] * 6)) == []


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"actor/grad_norm": 0.0}, "the gradient norm was 0 in every step"),
        ({"critic/score/max": 0.0}, "every sample of every step had the reward 0"),
    ],
)
def test_a_run_that_cannot_learn_causes_a_warning(
    tmp_path: Path, numbers: dict[str, float], words: str
) -> None:
    (line,) = advice_at_end(run_of(tmp_path, *[STEP | numbers] * 6))
    assert words in line


def test_the_summary_is_printed_at_the_end_and_shown_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, *[STEP | {"actor/grad_norm": 0.0}] * 6)
    close_run(tmp_path, None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["6 steps, 2 s each", "warning", "report"]
    assert f"<li>{lines[0]}</li>" in write_report(tmp_path).read_text()


def test_the_report_shows_starts_config_and_validation_samples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 2, samples=1)
    (folder / "config.yaml").write_text("data:\n  train_files: <b>rows</b>\n")
    start = {"time": "2026-01-01T00:00:00+00:00", "host": "here", "command": "verl-like ppo a=1"}
    starts = [start | {"versions": {"torch": "2.13"}}, start | {"command": "again", "versions": 3}]
    (folder / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in starts))
    (folder / "validation").mkdir()
    sample = {"input": "why", "output": "so", "score": 1.0, "format": 0.5, "verdict": "good"}
    (folder / "validation" / "2.jsonl").write_text(json.dumps(sample) + "\n")

    page = write_report(folder).read_text()
    assert "2026-01-01T00:00:00+00:00, here: torch 2.13" in page
    for command in ("verl-like ppo a=1", "again"):
        assert f'<pre class="command">{command}</pre>' in page
    assert "train_files: &lt;b&gt;rows&lt;/b&gt;" in page
    assert "<h2>Validation samples</h2>" in page
    assert "<td>format 0.5, verdict good</td>" in page
