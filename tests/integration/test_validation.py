"""Validation over the full set with separate noise, and the contents of the run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import lines, numbers, overrides
from trainer import load_config, run
from trainer.ppo.stages import PPOTrainer

RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    acc = float(ground_truth in solution_str)
    return {"score": acc - 0.5, "acc": acc, "length": len(solution_str), "pred": solution_str[:1]}
"""


def run_in(folder: Path, tiny: Path, *more: str) -> Path:
    run(load_config(overrides(tiny, folder, "trainer.backend=local", *more)))
    return folder


@pytest.fixture(scope="module")
def validated_run(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "rule.py").write_text(RULE, encoding="utf-8")
    sampling = [
        f"actor_rollout_ref.rollout.val_kwargs.{s}"
        for s in ("n=4", "do_sample=true", "temperature=2.0")
    ]
    validation = [f"data.val_files={tiny_dir}/val.parquet", "trainer.test_freq=2", *sampling]
    return run_in(folder / "run", tiny_dir, *validation, f"reward.function.path={folder}/rule.py")


def test_validation_metrics_have_verl_s_names(validated_run: Path) -> None:
    first = lines(validated_run)[0]
    names = [name for name in first if name.startswith("val-core/")]
    core = {name.removeprefix("val-core/verl_like/tiny_letters/") for name in names}
    of_four = {f"acc/{name}@4/{figure}" for name in ("best", "maj") for figure in ("mean", "std")}
    assert core == {"acc/mean@4", *of_four}
    aux = "val-aux/verl_like/tiny_letters/"
    assert {f"{aux}reward/mean@4", f"{aux}acc/std@4", f"{aux}length/best@2/mean"} <= first.keys()


def test_the_full_set_is_validated_with_separate_noise(validated_run: Path) -> None:
    samples = lines(validated_run, "validation/0.jsonl")
    assert len(samples) == 32 * 4
    assert [sample["uid"] for sample in samples[::4]] == [f"{row}-0" for row in range(32)]
    assert len({sample["output"] for sample in samples}) > 100
    metric = lines(validated_run)[0]["val-core/verl_like/tiny_letters/acc/mean@4"]
    assert metric == pytest.approx(sum(sample["acc"] for sample in samples) / len(samples))


def test_validation_does_not_change_training(
    validated_run: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    rule = f"reward.function.path={validated_run.parent}/rule.py"
    alone = run_in(tmp_path / "alone", tiny_dir, rule)
    trained = [
        {name: value for name, value in line.items() if not name.startswith("val-")}
        for line in numbers(validated_run)
    ]
    assert numbers(alone) == trained[1:]


def test_numbers_of_the_reward_function_are_logged_in_training(validated_run: Path) -> None:
    line, samples = lines(validated_run)[1], lines(validated_run, "rollouts/1.jsonl")
    assert line["reward/acc/mean"] == pytest.approx(sum(sample["acc"] for sample in samples) / 16)
    assert line["reward/length/mean"] == pytest.approx(
        sum(len(sample["output"]) for sample in samples) / 16
    )


def test_a_step_reports_its_number_its_epoch_and_times_per_token(validated_run: Path) -> None:
    for step, line in enumerate(lines(validated_run)[1:], 1):
        assert (line["training/global_step"], line["training/epoch"]) == (step, 0)
        tokens = line["response_length/mean"] * 16
        assert line["timing_per_token_ms/gen"] == pytest.approx(
            line["timing_s/gen"] * 1000 / tokens, rel=1e-4
        )
        update_ms = line["timing_per_token_ms/update_actor"] * line["perf/total_num_tokens"]
        assert update_ms == pytest.approx(line["timing_s/update_actor"] * 1000, rel=1e-4)
        stages = [line[f"timing_s/{name}"] for name in PPOTrainer.recipe.stages]
        assert sum(stages) <= line["timing_s/step"]
        # two processes' clocks
        assert line["timing_s/gen"] <= line["timing_s/sample"] + 0.01
        assert "timing_s/init_model" not in line


def test_the_samples_of_every_step_are_written(validated_run: Path) -> None:
    for step in (1, 2, 3):
        samples = lines(validated_run, f"rollouts/{step}.jsonl")
        assert len(samples) == 16
        score = sum(sample["score"] for sample in samples) / 16
        assert lines(validated_run)[step]["critic/score/mean"] == pytest.approx(score)
        names = "step uid sample data_source input output gts score pred"
        assert set(names.split()) <= samples[0].keys()
