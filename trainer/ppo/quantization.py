"""Roles whose weights are int8: what they cannot be together with, and how far a reference is off.

`check_quantization` refuses a configuration. `reference_drift` is what the policy differs from an
int8 reference before anything is learned, where both score the same samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.config.offload import device_type_of
from trainer.ppo.config import PPOConfig
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from workers.columns import has_column, read_columns
from workers.config import (
    FrozenFSDPConfig,
    RefConfig,
    RolloutConfig,
    TeacherModelConfig,
    model_rewards,
)
from workers.models.quantize import check_device

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

REF = "actor_rollout_ref.ref"
TEACHER = "distillation.teacher_model"


def check_quantization(config: PPOConfig) -> None:
    """Refuse int8 on devices that cannot, beside sharding, and for weights that move."""
    check_quantized_device(config)
    if "ref" in config.role_mapping and quantization_of(config, "ref"):
        _check_whole(REF, config.actor_rollout_ref.ref.fsdp_config)
        _check_reference(config)
    if "teacher" in config.role_mapping and quantization_of(config, "teacher"):
        _check_whole(TEACHER, config.distillation.teacher_model.fsdp_config)


def check_quantized_device(config: Any) -> None:
    """Refuse int8 on devices that cannot, of PPO or of best-of-n."""
    if any(quantization_of(config, role) for role in expand_roles(config.role_mapping)):
        check_device(device_type_of(config.trainer))


def quantization_of(config: Any, role: str) -> str | None:
    """How a role, of PPO or of best-of-n, holds its linear weights; None is as floats."""
    judges = model_rewards(config)
    config, role = config.of_role(role), config.kind_of(role)
    if role == "rollout":
        rollout: RolloutConfig = config.actor_rollout_ref.rollout
        return rollout.quantization
    if role == "ref":
        ref: RefConfig = config.actor_rollout_ref.ref
        return ref.quantization
    if role == "teacher":
        teacher: TeacherModelConfig = config.distillation.teacher_model
        return teacher.quantization
    return judges[role].quantization if role in judges else None


def _check_whole(section: str, sharding: FrozenFSDPConfig) -> None:
    """Int8 weights are whole on every rank, and stay where they are."""
    for name, is_off in (
        (f"fsdp_size={sharding.fsdp_size}", sharding.fsdp_size in (-1, 1)),
        ("param_offload=true", not sharding.param_offload),
    ):
        if not is_off:
            raise ConfigError(
                f"{section}.quantization=int8 keeps the whole model, a quarter of its float32 size,"
                f" on every rank: leave out {section}.fsdp_config.{name}, or the quantization."
            )


def _check_reference(config: PPOConfig) -> None:
    """A quantised reference has frozen weights of its own."""
    policy, pools = config.actor_rollout_ref, expand_roles(config.role_mapping)
    if policy.ref.update_every is not None:
        raise ConfigError(
            f"{REF}.quantization=int8 with {REF}.update_every={policy.ref.update_every}: weights "
            "that move are not held as int8, which would round their steps away. Drop one."
        )
    if policy.model.lora_rank > 0 and pools["ref"] == pools["actor"]:
        raise ConfigError(
            f"{REF}.quantization=int8 with model.lora_rank={policy.model.lora_rank}: the reference "
            "is the actor's own module with its adapters off, and loads nothing that could be "
            "int8. Leave the quantization out, or give role_mapping.ref another pool."
        )


def measures_reference(config: PPOConfig, step: int) -> bool:
    """Whether this step tells how far an int8 reference is off: before the actor has moved."""
    return (
        step == 1
        and "ref" in config.role_mapping
        and bool(config.actor_rollout_ref.ref.quantization)
    )


def reference_drift(batch: DataProto, config: PPOConfig, step: int) -> dict[str, float]:
    """At the first step, the mean |log-prob by the reference - by the actor| of a token.

    Both have the same weights then, and the actor's are not rounded.
    """
    if not measures_reference(config, step) or not has_column(batch, "old_log_probs"):
        return {}
    columns = read_columns(batch, "ref_log_prob", "old_log_probs", "response_mask")
    gaps = (columns["ref_log_prob"] - columns["old_log_probs"]).abs().double()
    inside = columns["response_mask"] != 0
    return {"ref/quantization_log_prob_diff_mean": float(gaps[inside].mean())}
