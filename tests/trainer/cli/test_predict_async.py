"""`verl-like predict-async`: predictions from options and from a measured run, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.report.report_runs import make_run
from trainer.cli import predict_async
from verl_like.errors import ConfigError

SECONDS = ["--gen-s=1.2", "--score-s=0.3", "--update-s=0.8", "--sync-s=0.1"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    predict_async.main(arguments)
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return json.loads(printed(capsys, *arguments, "--json"))


def test_the_table_has_seconds_speed_up_and_limit_of_each_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    lines = printed(capsys, *SECONDS, "--generators=1", "--max-staleness=0,1").splitlines()
    runs = [line.split() for line in lines[2:5]]
    assert runs[1][:5] == ["1", "1", "synchronous", "2.4", "1.00"]
    assert runs[1][-2:] == ["staleness", "bound"]
    assert runs[2][2:6] == ["staleness", "1", "1.3", "1.84"]
    assert runs[2][-1] == "generators"
    assert lines[-3] == predict_async.SPEED_UP
    assert lines[-1].startswith(
        "Recommended: async_training.generators=1 async_training.trainers=1 "
        "async_training.max_staleness=1: 1.3 s per step, 1.84x "
    )
    assert lines[-1].endswith(
        "Generation is then the bottleneck: with one more generator, a step takes 1.1 s."
    )


def test_json_has_the_phases_and_runs_of_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, *SECONDS)
    assert report["phases"] == {"generate": [1.2], "score": [0.3], "update": [0.8], "sync": [0.1]}
    assert [(run["num_generators"], run["run"]) for run in report["runs"]] == [
        (generators, run)
        for generators in (1, 2)
        for run in ("synchronous", "staleness 1", "staleness 4")
    ]
    for run in [*report["runs"], *report["ratios"]]:
        assert sum(run["shares"]["generator 0"].values()) == pytest.approx(1.0)


def test_generators_shared_unevenly_are_slower(capsys: pytest.CaptureFixture[str]) -> None:
    slow = as_json(capsys, "--gen-s=3", "--update-s=0.2", "--generators=3", "--trainers=2")
    even = as_json(capsys, "--gen-s=3", "--update-s=0.2", "--generators=4", "--trainers=2")
    assert "with 3 generators and 2 trainers, trainer 1 has 1 of the generators" in slow["notes"][0]
    assert even["notes"] == []
    times = [report["runs"][-1]["seconds_per_step"] for report in (slow, even)]
    assert times[0] == pytest.approx(2 * times[1], rel=0.05), (
        "a rank's half waits for one generator"
    )


def test_options_replace_measurements(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(make_run(tmp_path / "run", 3))
    assert as_json(capsys, folder)["phases"]["generate"] == [0.3, 0.3]
    slower = as_json(capsys, folder, "--gen-s=3")
    assert slower["phases"]["generate"] == [3.0]
    assert slower["phases"]["score"] == [0.15, 0.15]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "missing: --gen-s and --update-s"),
        (["--gen-s=0", "--update-s=1"], "^Set --gen-s above 0\\."),
        ([*SECONDS, "--max-inflight=1"], "--max-inflight=1 is less than a batch of 2 chunks"),
    ],
)
def test_missing_and_impossible_seconds_are_rejected(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        predict_async.main(arguments)
