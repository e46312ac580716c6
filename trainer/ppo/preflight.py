"""What PPO looks at before a process starts, beyond the configuration alone: models and pools."""

from __future__ import annotations

from typing import Any

from trainer.config.offload import check_offload, device_type_of
from trainer.memory import memory_of_this_gpu
from trainer.ppo.config import PPOConfig
from trainer.ppo.memory import check_memory, fit_passes
from trainer.rollouts.preflight import check_model, check_reward_models, check_rollout
from workers.config import critic_model
from workers.models.memory_shapes import check_adapter
from workers.models.tokenizers import check_same_tokenizer


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
