"""What PPO looks at before a process starts, beyond the configuration alone: models and pools."""

from __future__ import annotations

from typing import Any

from trainer.config.offload import check_offload, device_type_of
from trainer.memory import memory_of_this_gpu
from trainer.ppo.config import PPOConfig
from trainer.ppo.memory import check_memory, fit_passes
from trainer.ppo.roles import models_of
from trainer.rollouts.preflight import check_model, check_reward_models, check_rollout
from workers.models.memory_shapes import check_adapter
from workers.models.tokenizers import check_same_tokenizer


def preflight(config: PPOConfig) -> None:
    """Refuse models that are not there or too short, engines and offloads that are not there."""
    policy = config.actor_rollout_ref.model.path
    for role, model in models_of(config).items():
        if model.head == "score":
            continue  # check_reward_models knows its key
        check_model(config, model.key, model.model.path)
        if model.trains:
            check_adapter(model.model, model.head)
        elif model.head == "token":
            check_same_tokenizer(model.model.path, policy, role)
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
    sections: dict[str, tuple[str, Any]] = {}
    elsewhere = {}
    for model in models_of(config).values():
        section = model.section.removesuffix(".model")
        if section and (model.trains or section not in sections):
            sections[section] = (model.strategy if model.trains else "", model.fsdp)
            elsewhere[section] = model.section
    check_offload(config.trainer, sections, elsewhere)
