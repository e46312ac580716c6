"""The configuration of a run is settled once, and then only read."""

from __future__ import annotations

import copy
import pickle

import pytest
from hydra.core.override_parser.types import Override

from trainer import load_config
from trainer.config.compose import as_object, compose_tree, known_settings
from trainer.config.settings import keys_set
from trainer.config.settle import settle
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from trainer.ppo.roles import declared_models
from verl_like.config_key import replace_keys

NEEDED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
SERVER = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.server_urls=[http://a]"]
ONLY_TEACHER = [
    *("distillation.teacher_model.model_path=t", "distillation.use_task_rewards=false"),
    "environment=file.py:Class",
]
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]


def composed(*settings: str) -> tuple[PPOConfig, list[Override]]:
    known = known_settings([*NEEDED, *settings], PPO)
    return as_object(compose_tree(known, PPO), PPO), known


@pytest.mark.parametrize(
    "settings",
    [
        ["placement=split", "trainer.n_gpus_per_node=4", "data.train_batch_size=24"],
        ["trainer.simulate=2x8GiB", "critic.ppo_micro_batch_size_per_gpu=2"],
        [*GRPO, "critic.optim.lr=1e-5", "actor_rollout_ref.rollout.quantization=int8"],
    ],
)
def test_settling_changes_no_composed_configuration(settings: list[str]) -> None:
    config, known = composed(*settings)
    before = copy.deepcopy(config)
    settled, _ = settle(PPO, config, keys_set(known))
    assert config == before != settled
    assert settle(PPO, config, keys_set(known))[0] == settled


def test_a_settled_configuration_is_read_only_in_every_process() -> None:
    config = load_config(NEEDED)
    for copied in (config, pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        with pytest.raises(AttributeError, match="the configuration of a run is read-only"):
            copied.actor_rollout_ref.rollout.name = "hf"


def test_changed_returns_another_read_only_configuration() -> None:
    config = load_config(NEEDED)
    other = replace_keys(config, {"trainer.seed": 7, "critic.model.path": "other"})
    assert (other.trainer.seed, other.critic.model.path) == (7, "other")
    assert (config.trainer.seed, config.critic.model.path) == (1, "model")
    assert other.actor_rollout_ref is config.actor_rollout_ref
    with pytest.raises(AttributeError, match="read-only"):
        other.trainer.seed = 8


@pytest.mark.parametrize(
    ("read", "unread"),
    [
        (GRPO, ["critic.optim.lr=1", "critic.ppo_mini_batch_size=7", "trainer.critic_warmup=5"]),
        (SERVER, ["actor_rollout_ref.rollout.quantization=fp8"]),
        (ONLY_TEACHER, ["algorithm.adv_estimator=grpo_process"]),
    ],
)
def test_an_unread_key_has_its_default_value(
    read: list[str], unread: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config([*NEEDED, *read, *unread])
    (notice,) = caplog.messages
    assert "no effect" in notice
    assert config == load_config([*NEEDED, *read])


def test_keys_below_an_unread_key_are_unread(caplog: pytest.LogCaptureFixture) -> None:
    settings = ["critic.ppo_epochs=2", "actor_rollout_ref.actor.shuffle=true"]
    config = load_config([*NEEDED, *GRPO, *settings])
    assert not config.actor_rollout_ref.actor.shuffle
    assert "critic.ppo_epochs has no effect" in caplog.text
    assert "actor_rollout_ref.actor.shuffle has no effect" in caplog.text


def test_a_role_inherits_the_axes_of_the_run() -> None:
    axes_set = ["parallel.tp=2", "critic.parallel={tp: 1, sp: 2}", "trainer.n_gpus_per_node=2"]
    config = load_config([*NEEDED, *axes_set])
    axes = {role: model.sharding for role, model in declared_models(config).items()}
    assert (axes["actor"].tp, axes["actor"].sp) == (2, 1)
    assert (axes["critic"].tp, axes["critic"].sp) == (1, 2)


@pytest.mark.parametrize(
    ("settings", "sequences", "bucket_mb"),
    [
        ([], 256, 16.0),
        (["trainer.simulate=8xH100", "actor_rollout_ref.rollout.name=vllm"], 1024, 512.0),
        (
            [
                "trainer.simulate=8xH100",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.max_num_seqs=64",
                "placement=standalone",
                "actor_rollout_ref.rollout.update_weights_bucket_megabytes=2",
            ],
            64,
            2.0,
        ),
    ],
)
def test_gpus_have_larger_sizes(settings: list[str], sequences: int, bucket_mb: float) -> None:
    rollout = load_config([*NEEDED, *settings]).actor_rollout_ref.rollout
    assert rollout.max_num_seqs == sequences
    assert rollout.update_weights_bucket_megabytes == bucket_mb
