"""A tiny vision-language model learns colours and shapes by SFT, then by GRPO."""

from __future__ import annotations

from pathlib import Path

from examples.shapes.make import main
from tests.examples.scripts import EXAMPLES
from tests.integration.runs import lines
from trainer import load_config, run
from trainer.sft.recipe import SFT
from trainer.sft.step import SFTTrainer


def test_sft_and_grpo_train_on_pictures(tmp_path: Path) -> None:
    main(tmp_path)
    both = ["trainer.backend=local", "trainer.logger=[]"]
    lessons = [
        *(f"model.path={tmp_path}/model", f"data.train_files={tmp_path}/sft.parquet"),
        *("data.max_length=64", "data.train_batch_size=64", "optim.lr=2e-3"),
        *("trainer.total_training_steps=12", f"trainer.default_local_dir={tmp_path}/sft"),
    ]
    run(load_config([*lessons, *both], SFT), SFTTrainer)
    losses = [step["train/loss"] for step in lines(tmp_path / "sft")]
    assert losses[-1] < 0.6 * losses[0]

    practice = [
        f"actor_rollout_ref.model.path={tmp_path}/sft/model",
        *("algorithm=grpo", f"data.train_files={tmp_path}/train.parquet"),
        f"reward={EXAMPLES}/shapes/reward.py:score",
        *("data.train_batch_size=8", "data.max_prompt_length=32", "data.max_response_length=4"),
        *("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *("trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path}/grpo"),
    ]
    run(load_config([*practice, *both]))
    (step,) = lines(tmp_path / "grpo")
    assert step["actor/grad_norm"] > 0
    assert step["training/rollout_probs_diff_max"] < 2e-5
