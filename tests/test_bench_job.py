"""`benchmarks/bench_job.py` writes its row and JSON from a run's own records."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import load
from tests.forked import run_program
from tests.integration.runs import FEW_ROWS, POLICY_ALONE, lines, overrides
from verl_like.errors import ConfigError

RECORD = load("benchmarks/job_record.py")

HEADING = [
    "framework",
    "model",
    "parameters",
    "devices",
    "seconds per 1,024 prompts",
    "epochs",
    "response tokens/s",
    "hardware id",
    "commit",
]


def run_job() -> None:
    """Run `bench_job.py` in a separate process."""
    load("benchmarks/bench_job.py").main()


def bench(tiny: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in a separate process, because a command changes its environment."""
    length = "trainer.total_training_steps"
    settings = [
        setting
        for setting in overrides(tiny, folder / "run", *POLICY_ALONE, *FEW_ROWS)
        if not setting.startswith((length, "algorithm.use_kl_in_reward"))
    ]
    local = ("trainer.backend=local", "trainer.device=cpu")
    return run_program(run_job, *settings, *local, *more, folder=folder)


@pytest.fixture(scope="module")
def job_done(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a job of three steps of two epochs, and the command's output."""
    folder = tmp_path_factory.mktemp("job")
    epochs = "actor_rollout_ref.actor.ppo_epochs=2"
    done = bench(tiny_dir, folder, "--steps", "3", "--out", "made/job.json", epochs)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_row_averages_the_steps_after_the_first(
    job_done: tuple[Path, str],
) -> None:
    folder, output = job_done
    metrics = lines(folder / "run")[1:]
    seconds = sum(line["timing_s/step"] for line in metrics)
    tokens = sum(line["training/num_sampled_tokens"] for line in metrics)
    heading, rule, row = [cells(line) for line in output.splitlines() if line.startswith("|")]
    assert heading == HEADING
    assert set(rule) == {"---"}
    columns = dict(zip(heading, row, strict=True))
    assert columns["framework"].startswith("verl-like ")
    assert columns["model"].endswith("/model")
    assert columns["devices"].startswith("1 x ")
    assert columns["epochs"] == "2"
    per_1024 = float(columns["seconds per 1,024 prompts"].replace(",", ""))
    assert per_1024 == pytest.approx(seconds * 1024 / (2 * 4), rel=1e-3)
    rate = float(columns["response tokens/s"].replace(",", ""))
    assert rate == pytest.approx(tokens / seconds, rel=1e-3)


def test_the_json_has_the_phases_of_every_step_and_all_settings(job_done: tuple[Path, str]) -> None:
    folder, output = job_done
    assert output.splitlines()[-1] == "all results: made/job.json"
    record = json.loads((folder / "made" / "job.json").read_text(encoding="utf-8"))
    assert record["warm_up_steps"] == 1
    for step, line in zip(record["steps"], lines(folder / "run"), strict=True):
        assert (step["step"], step["seconds"]) == (line["step"], line["timing_s/step"])
        assert set(step["phases"]) >= {"sample", "score", "estimate", "update"}
        assert step["phases"]["update"] == line["timing_s/update"]
        assert sum(step["phases"].values()) <= step["seconds"] + 1e-3
    assert record["settings"]["actor_rollout_ref.actor.ppo_epochs"] == 2
    assert (record["job"]["samples_per_prompt"], record["job"]["epochs"]) == (2, 2)
    assert {"processor", "cores", "memory_gib", "cards"} == set(record["hardware"])
    assert record["command"].startswith("python benchmarks/bench_job.py ")


def test_a_job_that_cannot_be_measured_starts_no_run(tiny_dir: Path, tmp_path: Path) -> None:
    done = bench(tiny_dir, tmp_path, "--steps", "1")
    assert done.returncode
    assert "error: 1 step: the first one warms up and is left out" in done.stderr
    assert not (tmp_path / "run").exists()


def test_missing_steps_are_rejected(tiny_dir: Path) -> None:
    sizes = {"prompts_per_update": 512, "max_prompt_length": 8, "max_response_length": 8}
    job = RECORD.Job(str(tiny_dir / "model"), "cpu", 2, 512, 1, **sizes, epochs=1, steps=3)
    with pytest.raises(ConfigError, match="recorded 2, the last of them step 2"):
        RECORD.job_record("verl-like", job, [RECORD.JobStep(n, 1.0, 1, {}) for n in (1, 2)])
