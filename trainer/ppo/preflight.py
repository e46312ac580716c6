"""What PPO looks at before a process starts, beyond the configuration alone: models and pools."""

from __future__ import annotations

import json
from typing import Any

from trainer.data.files import listing
from trainer.ppo.config import PPOConfig
from trainer.ppo.memory import check_memory, device_type_of, memory_of_this_gpu
from verl_like.errors import ConfigError, nearest
from verl_like.placement.roles import expand_roles
from workers.models.folder import model_folder
from workers.models.tokenizers import check_same_tokenizer
from workers.training.router_loss import check_routers


def preflight(config: PPOConfig) -> None:
    """Refuse models that are not there or too short, and pools that cannot hold their roles."""
    check_model(config, "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)
    if "critic" in config.role_mapping:
        check_model(config, "critic.model.path", config.critic.model.path)
    if "teacher" in config.role_mapping:
        teacher = config.distillation.teacher_model.model_path
        check_model(config, "distillation.teacher_model.model_path", teacher)
        check_same_tokenizer(teacher, config.actor_rollout_ref.model.path, "teacher")
    if config.actor_rollout_ref.actor.router_aux_loss_coef > 0:
        check_routers(config.actor_rollout_ref.model.path)
    check_tensor_parallel(config)
    _check_offload(config)
    device_type = device_type_of(config)
    check_memory(config, device_type, memory_of_this_gpu(device_type))


def _check_offload(config: PPOConfig) -> None:
    """On CPUs there is one memory: what the user wants moved out of it stays, so it is refused."""
    if device_type_of(config) != "cpu" or config.trainer.nnodes > 1:
        return  # the driver's machine says nothing about those of a cluster
    policy, critic = config.actor_rollout_ref, config.critic
    sections = {
        "actor_rollout_ref.actor": (policy.actor.strategy, policy.actor.fsdp_config),
        "actor_rollout_ref.ref": ("", policy.ref.fsdp_config),
        "distillation.teacher_model": ("", config.distillation.teacher_model.fsdp_config),
    }
    if "critic" in config.role_mapping:
        sections["critic"] = (critic.strategy, critic.model.fsdp_config)
    for section, (strategy, fsdp) in sections.items():
        name = "critic.model" if section == "critic" else section
        keys = [key for key in ("param_offload", "optimizer_offload") if getattr(fsdp, key, None)]
        wanted = [f"{name}.fsdp_config.{key}=true" for key in keys]
        if strategy == "fsdp_offload":
            wanted.append(f"{section}.strategy=fsdp_offload")
        if wanted:
            raise ConfigError(
                f"{wanted[0]}: this run is on CPUs, whose only memory is the host's, so nothing "
                "can be moved out of it. Leave it out (strategy: fsdp), or take "
                "trainer.device=cuda."
            )


def read_model_config(key: str, path: str) -> dict[str, Any]:
    """`config.json` of a model folder."""
    folder = model_folder(path, weights=False)
    file = folder / "config.json"
    if not file.is_file():
        parent = folder.parent
        near = (
            nearest(folder.name, [entry.name for entry in parent.iterdir()])
            if parent.is_dir()
            else ""
        )
        there = (
            f"it holds {listing(folder)}" if folder.is_dir() else f"there is no such folder.{near}"
        )
        raise ConfigError(
            f"{key}={path} is not a Hugging Face model folder (no config.json): {there} "
            "`python examples/tiny/make.py DIR` makes a tiny one in DIR/model."
        )
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def check_model(config: Any, key: str, path: str) -> None:
    """Refuse a model that is not there, or has fewer positions than a sample has tokens."""
    limit = read_model_config(key, path).get("max_position_embeddings")
    data = config.data
    width = data.max_prompt_length + data.max_response_length
    if limit is not None and width > limit:
        raise ConfigError(
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} = {width} tokens, but "
            f"{key}={path} has {limit} positions. Lower one of them by {width - limit}."
        )


def check_tensor_parallel(config: Any) -> None:
    """Refuse engines of more ranks than the rollout's pool divides into."""
    rollout = config.actor_rollout_ref.rollout
    pool = expand_roles(config.role_mapping)["rollout"]
    ranks = sum(config.resource_pool_spec[pool])
    size = rollout.tensor_model_parallel_size
    if rollout.name == "vllm" and ranks % size:
        divisors = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide the "
            f"{ranks} processes of the rollout's pool {pool!r}; values that do: {divisors}."
        )
