"""A rehearsal passes a job without a bug, whatever its recipe, placement, axes and models are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.tools.rehearsal.jobs import RECIPES, settings_of, with_config
from trainer import load_config
from trainer.tools.rehearsal import rehearse

A8 = ("trainer.n_gpus_per_node=8",)
GPUS = ("trainer.simulate=8xH100",)
OF_IMAGES = "reward=<file>:reward_of_an_image"
FAST = {
    "grpo on vLLM and GPUs": (
        "ppo",
        "algorithm=grpo",
        "actor_rollout_ref.rollout.name=vllm",
        *GPUS,
    ),
    "sft": ("sft",),
    "images": ("images", *GPUS, "actor_rollout_ref.rollout.name=vllm", OF_IMAGES),
    "a model that vLLM decodes and native does not": (
        *("ppo", "algorithm=grpo", "actor_rollout_ref.rollout.name=vllm"),
        *("actor_rollout_ref.model.path=<tmp>/windows", *GPUS),
        "actor_rollout_ref.model.random_init_seed=1",
    ),
}
SLOW = {
    "ppo": ("ppo",),
    "ppo with KL": ("ppo", "algorithm.use_kl_in_reward=true"),
    "dapo": ("ppo", "algorithm=dapo"),
    "gspo": ("ppo", "algorithm=gspo"),
    "rloo": ("ppo", "algorithm=rloo"),
    "remax": ("ppo", "algorithm=remax"),
    "reinforce++": ("ppo", "algorithm=reinforce_plus_plus"),
    "dr_grpo": ("ppo", "algorithm=dr_grpo"),
    "split": ("ppo", "placement=split", *A8),
    "standalone": ("ppo", "placement=standalone", *A8),
    "tp": ("ppo", "algorithm=grpo", "parallel.tp=4", *A8),
    "sp of the actor": ("ppo", "algorithm=grpo", "actor_rollout_ref.actor.parallel.sp=2", *A8),
    "pp": ("ppo", "algorithm=grpo", "actor_rollout_ref.actor.parallel.pp=2", *A8),
    "offload": ("ppo", "algorithm=grpo", "actor_rollout_ref.actor.strategy=fsdp+offload", *GPUS),
    "lora": ("ppo", "algorithm=grpo", "actor_rollout_ref.model.lora_rank=8"),
    "lora of names": (
        *("ppo", "algorithm=grpo", "actor_rollout_ref.model.lora_rank=4"),
        "actor_rollout_ref.model.target_modules=[q_proj]",
    ),
    "bfloat16": ("ppo", "algorithm=grpo", "actor_rollout_ref.model.dtype=bfloat16"),
    "flash attention": (
        *("ppo", "algorithm=grpo", "actor_rollout_ref.model.attn_implementation=flash_attention_2"),
        *GPUS,
    ),
    "reward function": ("ppo", "algorithm=grpo", "reward=<file>:fine_reward"),
    "many samples": ("ppo", "algorithm=grpo", "actor_rollout_ref.rollout.n=64"),
    "reward model": (
        *("ppo", "algorithm=grpo", "reward.model.enable=true"),
        "reward.model.path=<classifier>",
    ),
    "quantized reference": (
        *("ppo", "algorithm=grpo", "actor_rollout_ref.actor.use_kl_loss=true"),
        "actor_rollout_ref.ref.quantization=int8",
    ),
    "checkpoints without state": (
        *("ppo", "algorithm=grpo"),
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    ),
    "critic first": ("ppo", "trainer.critic_warmup=2"),
    "validation": ("ppo", "algorithm=grpo", "data.val_files=<tiny>/val.parquet"),
    "environment": ("ppo", "algorithm=grpo", "environment=<file>:Counts"),
    "a teacher": (
        *("ppo", "algorithm=distillation", "actor_rollout_ref.rollout.n=2"),
        "distillation.teacher_model.model_path=<tiny>/model",
    ),
    "async": ("async", "algorithm=grpo"),
    "async of two generators": ("async", "algorithm=grpo", "async_training.generators=2"),
    "lora sft": ("sft", "model.lora_rank=8"),
    "dpo": ("dpo",),
    "simpo": ("dpo", "loss=simpo"),
    "reward model training": ("reward-model",),
    "images of SFT": ("images-sft",),
    "a trained tower": ("images", "actor_rollout_ref.model.freeze_vision_tower=false", OF_IMAGES),
    "images and LoRA": ("images", "actor_rollout_ref.model.lora_rank=4", OF_IMAGES),
    "images and a critic": ("images", "algorithm.adv_estimator=gae", OF_IMAGES),
}


@pytest.mark.parametrize(
    "job",
    [
        *(
            pytest.param(name, marks=pytest.mark.long) if name == "images" else name
            for name in FAST
        ),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_a_job_without_a_bug_passes(
    job: str, tiny_dir: Path, tmp_path: Path, classifier: Path
) -> None:
    name, *more = {**FAST, **SLOW}[job]
    if any("windows" in word for word in more):
        windows = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        with_config(tiny_dir, tmp_path / "windows", **windows, sliding_window=8)
    more = [word.replace("<classifier>", str(classifier)) for word in more]
    config = load_config(settings_of(name, tiny_dir, tmp_path, *more), RECIPES[name])
    before = sorted(tmp_path.rglob("*"))
    text = "\n".join(rehearse(config))
    assert "the resumed run: steps to 3" in text
    assert "export: the trained model" in text
    assert sorted(tmp_path.rglob("*")) == before, "it writes into no folder of the user"
