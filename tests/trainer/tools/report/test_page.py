"""The report shows a run folder, complete or not."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import draw_figures
from tests.trainer.tools.report.report_runs import make_run, metrics_of
from trainer.tools.report.figures import (
    WINDOWS,
    _band,
    curves,
    known_panels,
    panels_of,
    running_mean,
)
from trainer.tools.report.page import close_run, write_report
from trainer.tools.report.read import (
    last_steps,
    overlap_share,
    phase_shares,
    pools_at_work,
    read_run,
)
from verl_like.errors import ConfigError


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run") / "ppo", 20)


@pytest.fixture(scope="module")
def page(run_dir: Path, drawings: list[Any]) -> str:
    """The report of `run_dir`, with its figures."""
    with pytest.MonkeyPatch.context() as patch:
        draw_figures(drawings, patch)
        return page_of(run_dir)


def page_of(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def test_the_page_has_every_panel_the_timeline_and_the_tables(page: str) -> None:
    shown = re.findall(r'data-figure="([^"]+)"', page)
    panels = [panel.title for panel in known_panels() if not panel.only_if_there]
    assert shown == [*panels, "Timeline", "Phases"]
    assert page.count("<svg") == len(shown)
    assert "<title>critic-0: update_critic, 300.0 ms</title>" in page
    for cell in ("actor_rollout_ref_pool", "actor, rollout", "1 CPU slot", "critic_pool"):
        assert f"<td>{cell}</td>" in page


def test_the_page_loads_no_external_file(page: str) -> None:
    page = re.sub(r'xmlns(:xlink)?="[^"]*"|<!DOCTYPE[^>]*>', "", page)
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"|url\((?!#)[^)]*\)|@import', page) == []


def test_phase_shares_sum_to_100_and_match_the_metrics(run_dir: Path) -> None:
    data = read_run(run_dir)
    shares = phase_shares(data.metrics, data.stages)
    names = ["sample", "score", "estimate", "update", "sync", "other"]
    assert [name for name, _, _ in shares] == names
    assert sum(round(10 * share) for _, _, share in shares) == 1000
    assert dict((name, share) for name, _, share in shares)["update"] == pytest.approx(40.0)
    # validation and checkpoints come after the step
    seconds = {"step": 1.0, "sample": 0.75, "testing": 0.5, "save_checkpoint": 0.5}
    line = {f"timing_s/{name}": value for name, value in seconds.items()}
    expected = [("sample", 37.5), ("testing", 25.0), ("save_checkpoint", 25.0), ("other", 12.5)]
    assert [(name, share) for name, _, share in phase_shares([line], ["sample"])] == expected


def test_the_overlap_is_the_share_of_time_in_which_two_pools_work(run_dir: Path) -> None:
    calls = last_steps(read_run(run_dir).calls, 3)
    assert len(calls) == 3 * 5
    assert {number for _, _, number in pools_at_work(calls)} == {0, 1, 2}
    assert overlap_share(calls) == pytest.approx(0.4 / 0.85, abs=1e-6)


def test_samples_are_escaped_and_cut(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", 2, response="<script>alert(1)</script>" + "y" * 5000))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "more characters)" in page


@pytest.mark.usefixtures("figures")
def test_a_thousand_steps_take_seconds_and_few_megabytes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1000, samples=2)
    began = time.process_time()
    path = write_report(folder)
    assert time.process_time() - began < 5
    assert path.stat().st_size < 5e6


def test_metrics_of_other_recipes_have_figures(tmp_path: Path) -> None:
    step = {"step": 1, "train/loss": 0.7, "train/accuracy": 0.5, "timing_s/step": 0.1}
    lines = [step, {"step": 1, "val-core/rm/accuracy": 0.6, "val-aux/rm/margin": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    titles = [panel.title for panel in panels_of(read_run(tmp_path).metrics)]
    assert titles == ["train/loss", "train/accuracy", "val-core/rm/accuracy"]


def test_the_report_names_incomplete_and_missing_files(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 3)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40])
    (folder / "timeline.json").write_text('{"traceEvents": [{"ph"')
    (folder / "placement.txt").unlink()
    page = page_of(folder)
    assert "metrics.jsonl: 1 of 3 lines are incomplete" in page
    assert "timeline.json is incomplete" in page
    assert "placement.txt is missing" in page


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        (
            "metrics.jsonl",
            b'{"actor/entropy": 1}\n{"step": 1, "actor/entropy": "x"}\n',
            "1 of 2 lines have no step",
        ),
        (
            "timeline.json",
            b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}',
            "not written by a run",
        ),
        ("rollouts/1.jsonl", b'{"score": null}\n3\n', "1.jsonl: 1 of 2 lines"),
        ("placement.txt", b"\xff\xff", ""),
    ],
)
def test_foreign_content_is_skipped(tmp_path: Path, name: str, content: bytes, note: str) -> None:
    folder = make_run(tmp_path / "run", 1)
    (folder / name).write_bytes(content)
    assert note in " ".join(read_run(folder).notes)


@pytest.mark.usefixtures("figures")
def test_a_run_without_a_step_has_a_report_with_its_failure(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    close_run(tmp_path, RuntimeError("the critic's node is gone"))
    page = (tmp_path / "report.html").read_text()
    assert "the critic&#39;s node is gone" in page
    assert '<p class="outcome failed">failed after 0 steps' in page
    assert "No step ended." in page
    close_run(tmp_path, KeyboardInterrupt())
    page = (tmp_path / "report.html").read_text()
    assert "Stopped by Ctrl-C." in page
    assert '<p class="outcome stopped">stopped after 0 steps' in page
    close_run(tmp_path, None)
    assert "Stopped" not in (tmp_path / "report.html").read_text()


def test_a_failing_report_does_not_hide_the_failure_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "report.html").mkdir()
    close_run(tmp_path, RuntimeError("the cause"))
    assert "Try: verl-like report" in caplog.text


def test_a_folder_that_is_no_run_is_rejected_and_run_folders_in_it_are_named(
    tmp_path: Path,
) -> None:
    make_run(tmp_path / "a" / "run", 1)
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl .* Run folders in it: .*a/run"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        write_report(tmp_path / "nowhere")


def test_a_kl_of_0_in_every_step_is_not_drawn(figures: None, tmp_path: Path) -> None:
    lines = [{"step": n, "critic/score/mean": 0.5, "actor/ppo_kl": 0.0} for n in (1, 2)]
    (panel,) = (panel for panel in known_panels() if panel.title == "KL")
    for kl_of_the_last, drawn in ((0.0, False), (0.01, True)):
        lines[-1]["actor/ppo_kl"] = kl_of_the_last
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
        assert bool(curves(read_run(tmp_path).metrics, panel)) is drawn


def test_a_long_curve_has_its_running_mean() -> None:
    values = [float(step % 2) for step in range(1000)]
    values[500] = float("nan")
    _, means = running_mean(list(range(1000)), values)
    half = 1000 // (2 * WINDOWS)
    for place in (0, 7, 500, 640, 999):
        window = [v for v in values[max(place - half, 0) : place + half + 1] if v == v]
        assert means[place] == pytest.approx(sum(window) / len(window))


def test_a_pipe_or_a_device_is_not_read_as_a_timeline(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1)
    timeline = folder / "timeline.json"
    timeline.unlink()
    timeline.symlink_to("/dev/zero")
    assert "timeline.json is missing." in read_run(folder).notes
    timeline.unlink()
    os.mkfifo(timeline)
    assert "timeline.json is missing." in read_run(folder).notes


def test_a_run_whose_metrics_are_all_nan_has_a_report(figures: None, tmp_path: Path) -> None:
    file = make_run(tmp_path, 3) / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row |= {name: float("nan") for name in row if name != "step"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "<h2>Learning</h2>" in page_of(tmp_path)


def test_the_outcome_names_the_target_that_was_reached(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 3)
    reward = metrics_of(3)["critic/score/mean"]
    for target, outcome in (
        (reward - 0.01, f"reached reward {reward - 0.01:g}"),
        (9, ""),
    ):
        config = f"trainer: {{stop_at: {{critic/score/mean: {target}}}}}\n"
        (folder / "config.yaml").write_text(config)
        shown = re.findall(r'<p class="outcome \w+">(.*?)</p>', page_of(folder))
        assert shown == [outcome][: bool(outcome)]


def first_screen(page: str) -> str:
    return page[page.index("<h1>") : page.index("<h2>")]


RUN_CONFIG = """
actor_rollout_ref:
  model: {path: hub/small, lora_rank: 8}
  rollout: {n: 4}
  actor: {optim: {lr: 1.0e-05}, policy_loss: {loss_mode: gspo}}
algorithm: {adv_estimator: grpo}
data: {train_files: [a.parquet, b.parquet], val_files: c.parquet, train_batch_size: 16}
reward: {function: {path: my/reward.py, name: score}, model: {enable: false}}
"""


def test_the_first_screen_says_what_was_trained(tmp_path: Path, figures: None) -> None:
    folder = make_run(tmp_path / "run", 3)
    (folder / "config.yaml").write_text(RUN_CONFIG)
    start = {"host": "node1", "command": "verl-like ppo", "versions": {"verl-like": "0.2.0"}}
    start |= {"commit": "0123456789ab+", "rows": 7473}
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    screen = first_screen(page_of(folder))
    facts = re.findall(r'<dt class="soft">(.*?)</dt><dd>(.*?)</dd>', screen)
    plain = {name: re.sub(r"<br>|<[^>]+>", "|", value).strip("|") for name, value in facts}
    assert plain == {
        "Model": "hub/small||LoRA, rank 8",
        "Data": "a.parquet, b.parquet||7,473 rows, validated on c.parquet",
        "Reward": "my/reward.py:score",
        "Algorithm": "grpo, gspo loss||16 prompts x 4 samples, lr 1e-05",
        "Devices": "2 x 1 CPU slot||node1",
        "Commit": "0123456789ab+||verl-like 0.2.0",
    }


def test_the_first_screen_has_no_cards_of_machinery(tmp_path: Path, figures: None) -> None:
    file = make_run(tmp_path / "run", 3) / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["training/num_hash_matched_samples"] = 8.0
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    screen = first_screen(page_of(tmp_path / "run"))
    assert not re.search("no failure|overlap|verified by hash", screen)
    assert re.search(r"reward</span><b>\S+ → \S+</b>", screen)


def test_foreign_settings_and_starts_leave_facts_out(tmp_path: Path, figures: None) -> None:
    folder = make_run(tmp_path / "run", 1)
    for config in (
        "- 1\n",
        "a: [",
        "data: 3\nreward: {list: 3, function: 1}\ntrainer: {stop_at: 1}\n",
    ):
        (folder / "config.yaml").write_text(config)
        (folder / "starts.jsonl").write_text('{"commit": 3, "rows": "x", "versions": []}\n')
        assert "Devices" in first_screen(page_of(folder))


def test_the_alarms_of_a_run_are_on_the_first_screen(tmp_path: Path, figures: None) -> None:
    kls = (0.0, 0.5, 0.0, 0.3, 0.0)
    rows = [{"step": n, "timing_s/step": 1.0, "actor/ppo_kl": kl} for n, kl in enumerate(kls, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    screen = first_screen(page_of(tmp_path))
    assert '<section class="alarms"><b>1 alarm</b>' in screen
    assert "<li>Steps 2 to 4, 2 times: actor/ppo_kl is 0.3: one step moves the policy" in screen


def test_a_loss_that_is_0_up_to_rounding_is_not_drawn(tmp_path: Path, figures: None) -> None:
    rows = [{"step": n, "critic/score/mean": 0.5, "actor/pg_loss": 1e-8 * n} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(tmp_path)
    assert 'data-figure="Policy loss"' not in page
    assert "0 in every step up to rounding: Policy loss." in page


def test_every_metric_of_a_curve_leads_to_its_meaning(page: str) -> None:
    links = re.findall(r'<a href="#([^"]+)">\1</a>', page)
    assert {"critic/score/mean", "actor/pg_clipfrac"} <= {*links}
    assert {*links} == {*re.findall(r'<dt id="([^"]+)">', page)}
    assert "Above 0.2" not in page
    assert "Limit: 0.2" in page


def test_a_change_of_the_configuration_is_marked(tmp_path: Path, figures: None) -> None:
    folder = make_run(tmp_path / "run", 6)
    change = {"step": 4, "keys": {"trainer.save_freq": [-1, 7]}}
    (folder / "changes.jsonl").write_text(json.dumps(change) + "\n")
    text = page_of(folder)
    assert "After step 4, the run was resumed with trainer.save_freq=7 (was -1)." in text
    metrics, panel = read_run(folder).metrics, known_panels()[0]
    lines = [len(re.findall('id="line2d_', curves(metrics, panel, marks))) for marks in ([], [4.5])]
    assert lines[1] == lines[0] + 1


def test_the_first_and_the_last_sample_of_a_prompt_are_next_to_each_other(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 3)
    for step, response in ((1, "bb"), (3, "aa")):
        rows = [{"input": f"say {x}", "output": f"{response}{x}", "score": step} for x in "abc"]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rollouts" / f"{step}.jsonl").write_text(text)
    compared = read_run(folder).compared
    assert [(first.prompt, first.response, last.response) for first, last in compared] == [
        (f"say {x}", f"bb{x}", f"aa{x}") for x in "abc"
    ]
    assert '<table id="compared">' in page_of(folder)


def test_the_band_is_one_standard_error_where_it_is_known() -> None:
    lines = [
        {"step": step, "critic/score/mean": 1.0, "critic/score/min": 0.0, "critic/score/max": 2.0}
        for step in (1, 2)
    ]
    assert _band(lines, "critic/score")[1:] == ([0.0, 0.0], [2.0, 2.0])
    lines = [line | {"critic/score/standard_error": 0.25} for line in lines]
    assert _band(lines, "critic/score") == ([1, 2], [0.75, 0.75], [1.25, 1.25])
