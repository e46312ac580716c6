"""The configuration rejects values that cannot work, and lists the valid ones."""

from __future__ import annotations

import pytest

from trainer import load_config
from verl_like.errors import ConfigError

NEEDED = ["data.train_files=x", "actor_rollout_ref.model.path=y"]
VALUES = [
    ("trainer.seed=-1", ["trainer.seed=-1", "must be 0 or more"]),
    ("trainer.default_local_dir=", ["trainer.default_local_dir is empty", "name the folder"]),
    ("=3", ["There is no key ''. All keys"]),
    ("reward.list=[{name:a,weigth:2}]", ["An item of reward.list has no key 'weigth'", "'weight'"]),
    (
        "actor_rollout_ref.rollout.top_p=1.5",
        ["actor_rollout_ref.rollout.top_p=1.5", "must be above 0 and at most 1"],
    ),
    (
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true "
        "actor_rollout_ref.rollout.val_kwargs.top_k=0",
        ["actor_rollout_ref.rollout.val_kwargs.top_k=0", "above 0, or -1 for all"],
    ),
    (
        "actor_rollout_ref.model.dtype=float",
        ["actor_rollout_ref.model.dtype=float: choose float32 or bfloat16", "'float32'"],
    ),
    ("actor_rollout_ref.model.compute_dtype=int8", ["choose float32 or bfloat16"]),
    ("actor_rollout_ref.rollout.dtype=half", ["actor_rollout_ref.rollout.dtype=half"]),
    (
        "actor_rollout_ref.model.attn_implementation=flash",
        ["choose one of auto, flash_"],
    ),
    ("actor_rollout_ref.model.lora_rank=-1", ["lora_rank=-1: it must be 0 or more"]),
    ("actor_rollout_ref.actor.optim.lr=nan", ["actor.optim.lr=nan: it must be a number"]),
    (
        "actor_rollout_ref.actor.optim.betas=[0.9,1.5]",
        ["actor.optim.betas=[0.9, 1.5]", "two numbers"],
    ),
    (
        "actor_rollout_ref.actor.optim.min_lr_ratio=1.5",
        ["_ratio=1.5: it must be from 0 to 1"],
    ),
    ("actor_rollout_ref.actor.optim.wsd_decay_ratio=1.5", ["_ratio=1.5: it must be", "at most 1"]),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=1.5", ["_ratio=1.5", "from 0 to 1"]),
    ("critic.optim.lr_warmup_steps_ratio=1.5", ["critic.optim.lr_warmup_steps_", "from 0 to 1"]),
    (
        "algorithm.kl_ctrl.type=adaptve",
        ["algorithm.kl_ctrl.type=adaptve: choose fixed or adaptive", "'adaptive'"],
    ),
    ("algorithm.kl_ctrl.horizon=0", ["horizon=0: it must be above 0"]),
    ("algorithm.kl_ctrl.target_kl=0", ["target_kl=0.0: it must be above 0"]),
    ("cpus_per_process=-1", ["cpus_per_process=-1.0: it must be above 0"]),
    ("actor_rollout_ref.actor.optim.betas=[0.9]", ["betas=[0.9]", "two numbers"]),
    (
        "actor_rollout_ref.actor.strategy=single trainer.n_gpus_per_node=2",
        ["role 'actor' on pool 'global_pool'", "this one has 2; use ddp or fsdp"],
    ),
    (
        "critic.model.fsdp_config.fsdp_size=3 trainer.n_gpus_per_node=2",
        ["role 'critic' on pool", "fsdp_size=3 does not divide the 2 ranks"],
    ),
    ("actor_rollout_ref.actor.fsdp_config.fsdp_size=0", ["-1 for the whole pool"]),
]


@pytest.mark.parametrize(("overrides", "parts"), VALUES, ids=[overrides for overrides, _ in VALUES])
def test_a_value_that_cannot_work_is_refused(overrides: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*NEEDED, *overrides.split()])
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
