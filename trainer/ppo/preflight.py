"""What PPO looks at before a process starts, beyond the configuration alone: models and pools."""

from __future__ import annotations

from typing import Any

from trainer.config.offload import check_offload, device_type_of
from trainer.data.model_config import num_positions, read_model_config
from trainer.groups.nodes import joined_cluster
from trainer.memory import memory_of_this_gpu
from trainer.ppo.config import PPOConfig
from trainer.ppo.fit_passes import fit_passes
from trainer.ppo.memory import check_memory
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from workers.config import critic_model, rewards_of
from workers.models.load import check_score_head
from workers.models.memory_shapes import check_adapter
from workers.models.random_init import check_weights
from workers.models.tokenizers import check_same_tokenizer
from workers.rollout.build import own_engine
from workers.rollout.vllm.setup import check_version


def preflight(config: PPOConfig) -> None:
    """Refuse models that are not there or too short, engines and offloads that are not there."""
    check_model(config, "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)
    check_adapter(config.actor_rollout_ref.model, "token")
    if "critic" in config.role_mapping:
        check_model(config, "critic.model.path", config.critic.model.path)
        check_adapter(critic_model(config), "scalar")
    if "teacher" in config.role_mapping:
        teacher = config.distillation.teacher_model.model_path
        check_model(config, "distillation.teacher_model.model_path", teacher)
        check_same_tokenizer(teacher, config.actor_rollout_ref.model.path, "teacher")
    if config.actor_rollout_ref.actor.router_aux_loss_coef > 0:
        from workers.training.router_loss import check_routers  # with the engine: a second

        check_routers(config.actor_rollout_ref.model.path)
    check_reward_models(config)
    check_rollout(config)
    _check_offload(config)


def plan_memory(config: PPOConfig) -> None:
    """Passes as large as the devices have room for; roles that do not fit are refused."""
    device_type = device_type_of(config.trainer)
    device_bytes = memory_of_this_gpu(device_type)
    fit_passes(config, device_type, device_bytes)
    check_memory(config, device_type, device_bytes)


def _check_offload(config: PPOConfig) -> None:
    policy, critic = config.actor_rollout_ref, config.critic
    sections: dict[str, tuple[str, Any]] = {
        "actor_rollout_ref.actor": (policy.actor.strategy, policy.actor.fsdp_config),
        "actor_rollout_ref.ref": ("", policy.ref.fsdp_config),
        "distillation.teacher_model": ("", config.distillation.teacher_model.fsdp_config),
    }
    if "critic" in config.role_mapping:
        sections["critic"] = (critic.strategy, critic.model.fsdp_config)
    check_offload(config.trainer, sections, {"critic": "critic.model"})


def check_model(config: Any, key: str, path: str) -> None:
    """Refuse a model that is not there, or has fewer positions than a sample has tokens."""
    limit = num_positions(read_model_config(key, path))
    check_weights(key, path, config.actor_rollout_ref.model.random_init_seed)
    data = config.data
    width = data.max_prompt_length + data.max_response_length
    if limit is not None and width > limit:
        raise ConfigError(
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} = {width} tokens, but "
            f"{key}={path} has {limit} positions. Lower one of them by {width - limit}."
        )


def check_reward_models(config: Any) -> None:
    """Refuse reward models that are not there, too short, or without a score."""
    for number, reward in enumerate(rewards_of(config)):
        if reward.kind == "model":
            key = f"rewards[{number}].path" if config.rewards else "reward_model.model.path"
            check_model(config, key, reward.path)
            check_score_head(key, reward.path)


def check_rollout(config: Any, role: str = "rollout") -> None:
    """Refuse what is no engine, and engines of more ranks than the role's pool divides into."""
    rollout = config.actor_rollout_ref.rollout
    own_engine(rollout.name)
    pool = expand_roles(config.role_mapping)[role]
    ranks = sum(config.resource_pool_spec[pool])
    size = rollout.tensor_model_parallel_size
    if rollout.name == "vllm" and ranks % size:
        divisors = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide the "
            f"{ranks} processes of {role}'s pool {pool!r}; values that do: {divisors}."
        )
    joins = joined_cluster(config)
    if rollout.name == "vllm" and not joins:  # what is installed on other machines is not known
        check_version(device_type_of(config.trainer))
