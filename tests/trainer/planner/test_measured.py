"""Rates fitted to runs, and a run's own speed in the plan that is made from it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_program
from tests.integration.runs import overrides
from trainer.cli import calibrate, main, plan
from trainer.cli.calibrate import CPU, Case, calibrated, settings_of
from trainer.cli.job_record import machine_facts
from trainer.planner.devices import Device, Rates
from trainer.planner.layouts import Job
from trainer.planner.measured import MeasuredRun, fitted, own_seconds
from verl_like.errors import ConfigError

UNKNOWN = Device(CPU, 4.0, 1e11, 1e10, 1e9, 1e9, Rates(memory=1.0, hides=False), type=CPU)
TRUE = replace(
    UNKNOWN,
    rates=Rates(
        flops=0.1,
        read_flops=0.3,
        memory=1.0,
        link=0.2,
        call=0.03,
        layer=0.002,
        collective=0.001,
        decode_layer=0.0005,
        decode_row=1e-5,
        hides=False,
    ),
)


def jobs(tiny: Path) -> list[tuple[Job, dict[str, int]]]:
    """Jobs of several shapes and their ranks."""
    cases = [
        Case(64, 2, response, mini_batch, tokens, ranks)
        for response, (mini_batch, tokens), ranks in product(
            (16, 64), ((32, 16384), (8, 256)), (1, 2)
        )
    ]
    found = []
    for case in cases:
        settings = [
            setting.replace(f"{tiny}/small", str(tiny)) for setting in settings_of(case, tiny)
        ]
        job = plan.job_of([*settings, f"plan.gpus={case.ranks}", "plan.device=cpu"], UNKNOWN)
        found.append((job, dict.fromkeys(job.roles, case.ranks)))
    return found


def run_of(seconds: Any, cards: dict[str, int], step: float = 1.0) -> MeasuredRun:
    return MeasuredRun(Path(), seconds, cards, step, rewards=0.0, prompt=8.0, response=8.0)


def test_rates_are_found_from_what_calls_take(tiny_dir: Path) -> None:
    runs = [(job, run_of(own_seconds(job, TRUE, cards), cards)) for job, cards in jobs(tiny_dir)]
    found = fitted(UNKNOWN, runs)
    for job, run in runs:
        assert own_seconds(job, found, run.cards) == pytest.approx(run.seconds, rel=1e-3)
    assert asdict(found.rates) == pytest.approx(asdict(TRUE.rates), rel=0.05)


def test_a_run_on_one_rank_leaves_what_it_does_not_show(tiny_dir: Path) -> None:
    runs = [(job, run_of(own_seconds(job, TRUE, c), c)) for job, c in jobs(tiny_dir)[::2]]
    found = fitted(UNKNOWN, runs).rates
    assert (found.link, found.collective) == (UNKNOWN.rates.link, UNKNOWN.rates.collective)
    assert found.flops == pytest.approx(0.1, rel=0.05)


def test_a_slower_call_is_slower_in_every_placement(tiny_dir: Path) -> None:
    job, cards = jobs(tiny_dir)[0]
    seconds = own_seconds(job, UNKNOWN, cards)
    slower = seconds | {("actor", "update_actor"): 3 * seconds["actor", "update_actor"]}
    factors = run_of(slower, cards).factors(job)
    assert factors["actor", "update_actor"] == pytest.approx(3)
    assert factors["critic", "update_critic"] == pytest.approx(1)
    plain, corrected = (
        each.options("actor", 1)[0].seconds for each in (job, replace(job, factors=factors))
    )
    assert corrected[2] == pytest.approx(3 * plain[2], rel=0.05)
    assert corrected[1] == pytest.approx(plain[1])


@pytest.fixture(scope="module")
def run(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of three steps of PPO."""
    folder = tmp_path_factory.mktemp("measured")
    where = ("trainer.backend=local", "trainer.device=cpu", "trainer.total_training_steps=3")
    settings = [
        each
        for each in overrides(tiny_dir, folder / "run")
        if not each.startswith("trainer.total_training_steps")
    ]
    done = run_program(main.main, "ppo", *settings, *where, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's calibration, with made-up rates."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = calibrate.kept_at(CPU)
    file.parent.mkdir()
    record = {"hardware": machine_facts(), "device": asdict(replace(TRUE, measured="a test"))}
    file.write_text(json.dumps(record))
    return file


@pytest.mark.usefixtures("kept")
def test_a_plan_from_a_run_takes_its_settings_lengths_and_seconds(run: Path) -> None:
    measured = MeasuredRun.of(run)
    job = plan.job_of(["plan.gpus=1", "plan.device=cpu", f"plan.from_run={run}"])
    assert job.config.algorithm.adv_estimator == "gae"
    assert job.rows("actor").mean_response == pytest.approx(measured.response, rel=0.02)
    best = plan.plan(["plan.gpus=1", "plan.device=cpu", f"plan.from_run={run}"])
    assert "Seconds are corrected by the run" in best
    together = own_seconds(job, job.device, measured.cards)
    corrected = {call: together[call] * job.factors[call] for call in job.factors}
    assert corrected == pytest.approx({call: measured.seconds[call] for call in corrected})


def test_lengths_of_a_file_stand_for_a_mean(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([10] * 900 + [500] * 100))
    found = plan.read_lengths(str(file))
    assert sum(found) / len(found) == pytest.approx(59, rel=0.1)
    assert found[-1] == 500


def test_a_calibration_is_kept_for_its_machine(kept: Path) -> None:
    found = calibrated(CPU)
    assert found is not None
    assert found.rates == TRUE.rates
    record = json.loads(kept.read_text())
    record["hardware"]["cores"] += 1
    kept.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"measured on another machine \(\d+ cores of"):
        calibrated(CPU)
    assert calibrated(CPU, str(kept)) is not None
    with pytest.raises(ConfigError, match="was measured on cpu, and plan.device=H100"):
        calibrated("H100", str(kept))
    kept.write_text("{}")
    with pytest.raises(ConfigError, match="is no calibration of this version"):
        calibrated(CPU)
    kept.unlink()
    with pytest.raises(ConfigError, match="nobody has measured: run `verl-like plan --calibrate`"):
        calibrated(CPU)
    assert calibrated("H100") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "give a list of lengths in tokens, above 0"),
        ("[3, 0]", "above 0"),
        ("{", "is no JSON list"),
        ("[3, 4000]", "has a response of 4,000 tokens, above data.max_response_length=512"),
    ],
)
def test_lengths_that_contradict_are_refused(
    tiny_dir: Path, tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(text)
    asked = ["plan.gpus=1", "plan.device=H100", f"plan.lengths={file}"]
    with pytest.raises(ConfigError, match=words):
        plan.plan([*asked, f"actor_rollout_ref.model.path={tiny_dir}/model"])


def test_a_run_of_one_step_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "timing_s/step": 2.0}) + "\n")
    with pytest.raises(ConfigError, match="has no step behind its first one"):
        MeasuredRun.of(tmp_path)
