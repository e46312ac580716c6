"""The configuration rejects values that cannot work, and lists the valid ones."""

from __future__ import annotations

import pytest

from trainer import load_config
from verl_like.errors import ConfigError

NEEDED = ["data.train_files=x", "actor_rollout_ref.model.path=y"]
VALUES = [
    ("trainer.default_local_dir=", ["trainer.default_local_dir is empty", "name the folder"]),
    ("=3", ["there is no key ''. All keys"]),
    ("reward.list=[{name:a,weigth:2}]", ["an item of reward.list has no key 'weigth'", "'weight'"]),
    (
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true "
        "actor_rollout_ref.rollout.val_kwargs.top_k=0",
        ["actor_rollout_ref.rollout.val_kwargs.top_k=0", "above 0, or -1 for all"],
    ),
    ("actor_rollout_ref.actor.optim.lr=nan", ["actor.optim.lr=nan: it must be a number"]),
    (
        "actor_rollout_ref.actor.optim.betas=[0.9,1.5]",
        ["actor.optim.betas=[0.9, 1.5]", "two numbers"],
    ),
    ("critic.optim.lr_warmup_steps_ratio=1.5", ["critic.optim.lr_warmup_steps_", "from 0 to 1"]),
    (
        "actor_rollout_ref.actor.strategy=single trainer.n_gpus_per_node=2",
        ["role 'actor' on pool 'global_pool'", "this pool has 2. Set strategy=ddp or fsdp"],
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
