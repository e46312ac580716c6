"""`verl-like make-tiny --images` writes a model and pictures that SFT and GRPO train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import lines
from trainer import load_config, run
from trainer.cli.make_tiny import main, make
from trainer.sft.recipe import SFT
from trainer.sft.step import SFTTrainer


def test_a_tiny_model_with_eyes_trains_on_its_pictures(tmp_path: Path) -> None:
    main([str(tmp_path), "--images", "--num-train", "8", "--num-val", "4"])
    for_all = ["trainer.backend=local", "trainer.logger=[]", "trainer.total_training_steps=1"]
    for_all += [f"data.train_files={tmp_path}/train.parquet", "data.train_batch_size=4"]
    sft = [f"model.path={tmp_path}/model", f"trainer.default_local_dir={tmp_path}/sft"]
    run(load_config([*for_all, *sft, "data.max_length=64"], SFT), SFTTrainer)
    (step,) = lines(tmp_path / "sft")
    assert step["train/loss"] > 0

    grpo = [f"actor_rollout_ref.model.path={tmp_path}/model", "algorithm=grpo"]
    grpo += [f"trainer.default_local_dir={tmp_path}/grpo", "data.max_prompt_length=24"]
    grpo += ["data.max_response_length=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    run(load_config([*for_all, *grpo, "actor_rollout_ref.rollout.n=2"]))
    (step,) = lines(tmp_path / "grpo")
    assert step["training/rollout_probs_diff_max"] < 2e-5


@pytest.mark.parametrize("size", [8, 24])
def test_other_widths_are_written(size: int, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    make(tmp_path, images=True, num_train=1, num_val=1, hidden_size=size, num_layers=1)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    assert model.config.get_text_config().hidden_size == size
