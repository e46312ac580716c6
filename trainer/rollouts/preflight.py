"""Checks of every recipe that samples before a process starts: models, engines, their sizes."""

from __future__ import annotations

from typing import Any

from trainer.config.devices import devices_of
from trainer.data.model_config import num_positions, read_model_config
from trainer.groups.nodes import joined_cluster
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from workers.config import rewards_of
from workers.models.load import check_score_head
from workers.models.random_init import check_weights
from workers.rollout.build import user_engine
from workers.rollout.vllm.setup import check_version


def check_model(config: Any, key: str, path: str) -> None:
    """Reject a model that is missing, or has fewer positions than a sample has tokens."""
    limit = num_positions(read_model_config(key, path))
    if config.trainer.simulate is None:
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
    """Reject reward models that are missing, too short, or without a score head."""
    for number, reward in enumerate(rewards_of(config)):
        if reward.kind == "model":
            key = f"rewards[{number}].path" if config.rewards else "reward_model.model.path"
            check_model(config, key, reward.path)
            check_score_head(key, reward.path)


def check_rollout(config: Any, role: str = "rollout") -> None:
    """Reject an unknown engine, and engines whose ranks do not divide the role's pool."""
    rollout = config.actor_rollout_ref.rollout
    user_engine(rollout.name)
    pool = expand_roles(config.role_mapping)[role]
    ranks = sum(config.resource_pool_spec[pool])
    size = rollout.tensor_model_parallel_size
    if rollout.name == "vllm" and ranks % size:
        divisors = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide the "
            f"{ranks} processes of {role}'s pool {pool!r}; values that do: {divisors}."
        )
    # packages on other machines are not known
    elsewhere = joined_cluster(config) or config.trainer.simulate or rollout.server_urls
    if rollout.name == "vllm" and not elsewhere:
        check_version(devices_of(config.trainer).type)
