"""Every documented form of a reward function, in training and in evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.runs import POLICY_ALONE, lines
from trainer import load_config, run
from trainer.config.schema import Recipe
from trainer.config.settings import overrides_of
from trainer.ppo.recipe import PPO
from trainer.tools.evaluation.recipe import EVAL
from trainer.tools.report.read import read_run

FORMS = """
def share(text, letter):
    return text.count(letter) / 8

def of_verl(data_source, solution_str, ground_truth, extra_info):
    return {"score": share(solution_str, extra_info["letter"]), "acc": float(ground_truth == "a")}

def of_a_column(response, answer):
    return share(response, answer)

def of_all(**row):
    return share(row["solution_str"], row["answer"])

def with_settings(prompt, response, answer, scale):
    return scale * share(response, answer)

async def side_by_side(response, answer):
    return share(response, answer)

def of_a_batch(responses, answer):
    return [share(*pair) for pair in zip(responses, answer, strict=True)]
"""
NAMES = ("of_verl", "of_a_column", "of_all", "with_settings", "side_by_side", "of_a_batch")
ONE_STEP = [
    *POLICY_ALONE,
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
]


@pytest.mark.parametrize(
    ("recipe", "files", "more"),
    [(PPO, "train_files", ONE_STEP), (EVAL, "val_files", [])],
    ids=["train", "eval"],
)
def test_every_form_of_a_reward_scores(
    recipe: Recipe, files: str, more: list[str], tiny_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "forms.py").write_text(FORMS)
    rows = [
        {"prompt": f"say {c}", "answer": c, "extra_info": {"letter": c}}
        | {"reward_model": {"ground_truth": c}}
        for c in "abcd"
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rewards = [
        {"name": name, "path": f"{tmp_path}/forms.py", "function": name}
        | ({"kwargs": {"scale": 1.0}} if name == "with_settings" else {})
        for name in NAMES
    ]
    settings = [
        f"actor_rollout_ref.model.path={tiny_dir}/model",
        f"data.{files}={tmp_path}/rows.jsonl",
        *overrides_of({"reward.list": rewards}),
        f"trainer.default_local_dir={tmp_path}/run",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "trainer.backend=local",
        "trainer.logger=[]",
        *more,
    ]
    run(load_config(settings, recipe))
    folder = tmp_path / "run" / ("validation" if recipe is EVAL else "rollouts")
    (file,) = folder.glob("*.jsonl")
    samples = lines(folder, file.name)
    assert len(samples) == (4 if recipe is EVAL else 8)
    for sample in samples:
        expected = sample["output"].count(sample["gts"]) / 8
        assert sample["score"] == pytest.approx(len(NAMES) * expected)
        letter = sample["gts"]
        assert sample["columns"] == {"answer": letter, "extra_info": {"letter": letter}}
    assert {shown.truth for shown in read_run(tmp_path / "run").samples} <= {
        f"{letter}\nanswer: {letter}\nextra_info: {{'letter': '{letter}'}}" for letter in "abcd"
    }
    assert all(line.get("reward/num_failed", 0) == 0 for line in lines(tmp_path / "run"))
