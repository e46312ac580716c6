"""Every metric that a run writes is on the page of metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.runs import FEW_ROWS, lines, overrides, overrides_on_rows, write_jsonl
from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.config.schema import Recipe
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT
from trainer.tools.report.figures import meaning_of, meanings

SHORT = ("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=1")
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
ROWS = {
    "sft": (SFT, [{"prompt": "a", "response": "b"}]),
    "dpo": (DPO, [PAIR]),
    "kto": (DPO, [{"prompt": "a", "response": "b", "label": n == 0} for n in range(2)]),
    "reward-model": (REWARD_MODEL, [PAIR]),
}
POLICIES: dict[str, tuple[Recipe, tuple[str, ...]]] = {
    "ppo": (PPO, ("trainer.critic_warmup=1",)),
    "dapo": (PPO, ("algorithm=dapo", "correction=decoupled_token_icepop")),
    "others": (PPO, (
        "algorithm.running_norm=[rewards,advantages]", "algorithm.score_clip=1",
        "algorithm.use_pf_ppo=true", "algorithm.mask_truncated=true",
        "algorithm.kl_ctrl.type=adaptive", "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_is_batch_normalize=true",
        "algorithm.rollout_correction.rollout_token_veto_threshold=1e-4",
        "algorithm.rollout_correction.rollout_rs='token_k1,seq_mean_k3'",
        "algorithm.rollout_correction.rollout_rs_threshold='2.0,0.1'",
        "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
        "actor_rollout_ref.actor.target_entropy=1", "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ema_decay=0.9", "actor_rollout_ref.ref.update_every=1",
        "actor_rollout_ref.rollout.quantization=int8",
    )),
    "agents": (PPO, (
        "algorithm=grpo", "environment=tests.workers.agents.games:Count",
        "actor_rollout_ref.ref.quantization=int8",
    )),
    "distillation": (PPO, (
        "algorithm=distillation", "distillation.teacher_model.model_path={tiny}/model",
    )),
    "async": (ASYNC, ("algorithm=grpo",)),
}  # fmt: skip
TIMES = re.compile(r"`(\w+)`")


def unknown_metrics(folder: Path) -> set[str]:
    """Return the metrics of the run without a meaning; each time needs its own name on the page."""
    names = {name for line in lines(folder) for name in line} - {"step"}
    times = {f"timing_s/{name}" for name in TIMES.findall(meanings()["timing_s/*"][1])}
    times |= meanings().keys()
    timed = {name for name in names if name.startswith("timing_s/")}
    return {name for name in names if not meaning_of(name)[1]} | (timed - times)


@pytest.mark.parametrize("name", POLICIES)
def test_the_page_has_the_metrics_of_a_policy_s_run(
    name: str, tiny_dir: Path, tmp_path: Path
) -> None:
    recipe, more = POLICIES[name]
    settings = [*SHORT, *FEW_ROWS, "data.val_files={tiny}/few.parquet", *more]
    settings = [setting.replace("{tiny}", str(tiny_dir)) for setting in settings]
    settings = overrides(tiny_dir, tmp_path / "run", "trainer.backend=local", *settings)
    if recipe is ASYNC or any(setting.startswith("algorithm=") for setting in more):
        settings.remove("algorithm.use_kl_in_reward=true")
    run(load_config(settings, recipe))
    assert unknown_metrics(tmp_path / "run") == set()


@pytest.mark.parametrize("name", ROWS)
def test_the_page_has_the_metrics_of_a_run_on_rows(
    name: str, tiny_dir: Path, tmp_path: Path
) -> None:
    recipe, rows = ROWS[name]
    file = write_jsonl(tmp_path / "rows.jsonl", rows * 8)
    settings = (*SHORT, "data.train_batch_size=4", *(["loss=kto"] if name == "kto" else []))
    files = {"train": file, "val": file}
    run(load_config(overrides_on_rows(tiny_dir, files, tmp_path / "run", *settings), recipe))
    assert unknown_metrics(tmp_path / "run") == set()
