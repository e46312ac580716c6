"""A comparison of runs: their settings, ends and times, on one axis."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.trainer.tools.report.report_runs import make_run
from trainer.cli import compare as command
from trainer.run_folder.folder import saved_config
from trainer.tools.compare import tables
from trainer.tools.compare.tables import (
    bests_of,
    ends_of,
    groups_by_seed,
    read_runs,
    write_comparison,
)
from trainer.tools.migrate.systems import migrate
from trainer.tools.replay.saved_run import SavedRun
from verl_like.errors import ConfigError

NAMED = {"trainer": {"experiment_name": "x", "seed": 1}, "optim": {"lr": 1e-3}}


def run_of(folder: Path, values: Mapping[str, list[float]], **changed: Any) -> Path:
    """Create a run folder with these metrics, one value per step, and these sections of `NAMED`."""
    folder.mkdir(parents=True)
    config = OmegaConf.merge(NAMED, changed, {"trainer": {"experiment_name": folder.name}})
    OmegaConf.save(config, folder / "config.yaml")
    steps = zip(*values.values(), strict=True)
    lines = [{"step": n, **dict(zip(values, v, strict=True))} for n, v in enumerate(steps, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.fixture
def three_runs(tmp_path: Path) -> list[Path]:
    """Two seeds of one run, and a run with another learning rate that failed."""
    rise = [float(step) for step in range(20)]
    first = run_of(tmp_path / "a", {"critic/score/mean": rise})
    other_seed = [value + 2 for value in rise]
    second = run_of(tmp_path / "b", {"critic/score/mean": other_seed}, trainer={"seed": 2})
    third = run_of(tmp_path / "c", {"critic/score/mean": rise}, optim={"lr": 0.1})
    (third / "failure.txt").write_text("Traceback\n  line\nValueError: too large")
    return [first, second, third]


def test_only_differing_settings_are_listed(three_runs: list[Path]) -> None:
    assert tables.differences(read_runs(three_runs)) == [
        ["key", "a", "b", "c"],
        ["trainer.seed", "1", "2", "1"],
        ["optim.lr", "0.001", "0.001", "0.1"],
    ]


def test_runs_that_differ_in_the_seed_share_a_column_with_mean_and_deviation(
    three_runs: list[Path],
) -> None:
    runs = read_runs(three_runs)
    assert {name: len(group) for name, group in groups_by_seed(runs).items()} == {"a": 2, "c": 1}
    heading, row = tables.results(runs)
    assert heading == ["metric", "a (2 seeds)", "best", "c", "best"]
    ends = np.asarray([np.mean([18, 19]), np.mean([20, 21])])
    assert row == [
        "critic/score/mean",
        f"{ends.mean():.4g} ± {ends.std(ddof=1):.2g}",
        "20 ± 1.4",
        "18.5",
        "19",
    ]


def test_the_overview_says_how_each_run_ended(three_runs: list[Path]) -> None:
    outcomes = [row[-1] for row in tables.overview(read_runs(three_runs))[1:]]
    assert outcomes == ["no failure", "no failure", "failed: ValueError: too large"]


def test_the_best_loss_is_the_lowest_and_a_policy_loss_has_no_best(tmp_path: Path) -> None:
    values = {"loss": [3.0, 1.0, 2.0], "actor/pg_loss": [3.0, 1.0, 2.0], "nan": [1.0, 2.0, 3.0]}
    values["nan"][2] = float("nan")
    runs = read_runs([run_of(tmp_path / name, values) for name in "ab"])
    assert bests_of(runs[:1], "loss") == [1.0]
    assert ends_of(runs[:1], "nan") == [2.0]
    assert bests_of(runs, "actor/pg_loss") == []


def test_phase_times_and_placements_are_compared(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / name, 3) for name in "ab"])
    rows = tables.phases(runs)
    assert rows[0] == ["phase", "a", "b"]
    assert ["gen", "0.300 s, 30.0 %", "0.300 s, 30.0 %"] in rows
    ((names, placement),) = tables.placements(runs)
    assert names == "a, b"
    assert "critic_pool" in placement[2]


@pytest.mark.usefixtures("figures")
def test_the_page_has_a_curve_of_every_run(three_runs: list[Path], tmp_path: Path) -> None:
    runs = read_runs(three_runs[:2])
    page = write_comparison(runs, tmp_path / "out" / "page.html").read_text()
    assert re.findall(r'data-figure="([^"]+)"', page) == ["critic/score/mean"]
    (svg,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert {">a<", ">b<"} <= set(re.findall(r">[ab]<", svg))
    page = re.sub(r'xmlns(:xlink)?="[^"]*"|<!DOCTYPE[^>]*>', "", page)
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', page) == []


@pytest.mark.usefixtures("figures")
def test_the_command_writes_its_page_into_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(make_run(tmp_path / name, 2, samples=1)) for name in "ab"]
    monkeypatch.chdir(tmp_path)
    command.main(folders)
    assert capsys.readouterr().out.endswith("comparison: comparison.html\n")


def test_fewer_than_two_runs_are_rejected(three_runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="needs two or more run folders, but this command names 1"
    ):
        read_runs([three_runs[0], f"{three_runs[0]}/"])
    with pytest.raises(ConfigError, match="has no metrics.jsonl.*Run folders in it"):
        read_runs([three_runs[0], tmp_path])
    (three_runs[1] / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="config.yaml cannot be read as a run's configuration"):
        read_runs(three_runs)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.long
@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]", "a: " + "[" * 2000])
def test_aliases_that_expand_without_end_are_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    for read in (saved_config, SavedRun.read):
        with pytest.raises(ConfigError, match=r"config\.yaml cannot be read as a run's config"):
            read(tmp_path)
    with pytest.raises(ConfigError, match="the YAML could not be read"):
        migrate("trl", f"trl sft --config {tmp_path}/config.yaml")


def test_a_few_aliases_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: &a [1, 2]\nb: {c: *a, d: *a, e: 1e-6}")
    assert saved_config(tmp_path) == {"a": [1, 2], "b.c": [1, 2], "b.d": [1, 2], "b.e": 1e-6}


def test_a_placement_with_rows_of_unequal_length_is_shown(three_runs: list[Path]) -> None:
    (three_runs[0] / "placement.txt").write_text("pool  devices\n\nmine  a  b\n")
    text = tables.comparison_text(read_runs(three_runs))
    assert "mine  a        b" in text
