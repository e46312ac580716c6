"""Keys that the user set and that nothing chosen reads: an error, or for verl's usual ones a notice.

`trainer.compose` calls `check_unread`. A rule says under which condition a part of the tree is read, and otherwise why
not; a key without a rule is always read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trainer.config import PPOConfig
from verl_like.errors import ConfigError

NO_EFFECT_HERE = frozenset(
    {
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "critic.optim.lr",
        "critic.model.path",
        "critic.model.enable_gradient_checkpointing",
        "critic.model.fsdp_config.param_offload",
        "critic.model.fsdp_config.optimizer_offload",
        "critic.ppo_micro_batch_size_per_gpu",
        "trainer.critic_warmup",
        "data.val_files",
        "trainer.total_epochs",
        "trainer.max_ckpt_to_keep",
    }
)
"""Keys of verl's split-placement command, which must compose whatever else is set."""


@dataclass(frozen=True)
class Rule:
    """`key` (a leaf, or a section with a dot at its end) is read where `holds`; `why` says what is missing."""

    key: str
    holds: Callable[[PPOConfig], bool]
    why: str


def _has_critic(config: PPOConfig) -> bool:
    return "critic" in config.role_mapping


def _validates(config: PPOConfig) -> bool:
    return bool(config.data.val_files) and (config.trainer.val_before_train or config.trainer.test_freq > 0)


def _estimator_takes(parameter: str) -> Callable[[PPOConfig], bool]:
    def holds(config: PPOConfig) -> bool:
        from trainer.advantages import ADVANTAGE_ESTIMATORS
        from verl_like.registry import look_up

        estimator = look_up(config.algorithm.adv_estimator, ADVANTAGE_ESTIMATORS, "advantage estimator")
        return parameter in inspect.signature(estimator).parameters

    return holds


ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
RULES = (
    Rule("critic.", _has_critic, "this run has no critic: algorithm.adv_estimator takes no values"),
    Rule("trainer.critic_warmup", _has_critic, "this run has no critic: algorithm.adv_estimator takes no values"),
    Rule(
        "actor_rollout_ref.ref.",
        lambda c: c.algorithm.use_kl_in_reward or c.actor_rollout_ref.actor.use_kl_loss,
        "this run has no reference: set algorithm.use_kl_in_reward or actor_rollout_ref.actor.use_kl_loss",
    ),
    *(
        Rule(ROLLOUT + name, lambda c: c.actor_rollout_ref.rollout.name == "vllm", "only rollout.name=vllm reads it")
        for name in ("tensor_model_parallel_size", "gpu_memory_utilization", "engine_kwargs")
    ),
    Rule(ROLLOUT + "val_kwargs.", _validates, "this run does not validate: it needs data.val_files and a time to"),
    Rule("data.val_files", _validates, "this run never validates: set trainer.test_freq or trainer.val_before_train"),
    Rule(
        "trainer.test_freq", lambda c: bool(c.data.val_files) or c.trainer.test_freq <= 0, "there are no data.val_files"
    ),
    Rule(
        "trainer.val_before_train",
        lambda c: bool(c.data.val_files) or not c.trainer.val_before_train,
        "there are no data.val_files",
    ),
    Rule(
        ACTOR + "clip_ratio",
        lambda c: c.actor_rollout_ref.actor.clip_ratio_low is None or c.actor_rollout_ref.actor.clip_ratio_high is None,
        "clip_ratio_low and clip_ratio_high are both set and replace it",
    ),
    *(
        Rule(ACTOR + name, lambda c: c.actor_rollout_ref.actor.use_kl_loss, "actor.use_kl_loss is false")
        for name in ("kl_loss_coef", "kl_loss_type")
    ),
    Rule(
        ROLLOUT + "top_k", lambda c: c.actor_rollout_ref.rollout.do_sample, "rollout.do_sample=false decodes greedily"
    ),
    Rule(
        ROLLOUT + "top_p", lambda c: c.actor_rollout_ref.rollout.do_sample, "rollout.do_sample=false decodes greedily"
    ),
    Rule(
        ACTOR + "ppo_max_token_len_per_gpu",
        lambda c: c.actor_rollout_ref.actor.use_dynamic_bsz,
        "actor.use_dynamic_bsz is false",
    ),
    Rule("algorithm.gamma", _estimator_takes("gamma"), "algorithm.adv_estimator does not take it"),
    Rule("algorithm.lam", _estimator_takes("lam"), "algorithm.adv_estimator does not take it"),
    Rule(
        "algorithm.norm_adv_by_std_in_grpo",
        _estimator_takes("norm_adv_by_std_in_grpo"),
        "algorithm.adv_estimator does not take it",
    ),
    Rule("algorithm.kl_penalty", lambda c: c.algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward is false"),
    Rule("algorithm.kl_ctrl.", lambda c: c.algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward is false"),
    *(
        Rule(
            f"algorithm.kl_ctrl.{name}",
            lambda c: c.algorithm.kl_ctrl.type == "adaptive",
            "kl_ctrl.type is not adaptive",
        )
        for name in ("horizon", "target_kl")
    ),
    *(
        Rule(f"custom_reward_function.{name}", lambda c: bool(c.custom_reward_function.path), "there is no path")
        for name in ("name", "reward_kwargs")
    ),
    Rule("reward_model.rule_weight", lambda c: c.reward_model.enable, "reward_model.enable is false"),
    Rule("reward_model.model.", lambda c: c.reward_model.enable, "reward_model.enable is false"),
    *(
        Rule(
            f"reward_model.overlong_buffer.{name}",
            lambda c: c.reward_model.overlong_buffer.enable,
            "its enable is false",
        )
        for name in ("len", "penalty_factor")
    ),
    Rule("data.custom_cls.name", lambda c: bool(c.data.custom_cls.path), "there is no data.custom_cls.path"),
    Rule("trainer.max_ckpt_to_keep", lambda c: c.trainer.save_freq > 0, "trainer.save_freq writes no checkpoints"),
    Rule(
        "trainer.resume_from_path",
        lambda c: c.trainer.resume_mode == "resume_path",
        "trainer.resume_mode is not resume_path",
    ),
    Rule(
        "trainer.total_epochs", lambda c: c.trainer.total_training_steps is None, "trainer.total_training_steps is set"
    ),
    Rule("ray.", lambda c: c.trainer.backend == "ray", "trainer.backend is not ray"),
)


def check_unread(config: PPOConfig, keys: Iterable[str]) -> list[str]:
    """Notices on those of the user's `keys` that have no effect here; refuses the others that nothing reads."""
    notices = []
    for key in keys:
        why = next((rule.why for rule in RULES if _covers(rule.key, key) and not rule.holds(config)), None)
        if why is None:
            continue
        if key not in NO_EFFECT_HERE:
            raise ConfigError(f"{key} is set, but nothing reads it in this run: {why}. Drop it, or change that.")
        notices.append(f"notice: {key} has no effect here: {why}")
    return notices


def _covers(rule_key: str, key: str) -> bool:
    return key == rule_key or (rule_key.endswith(".") and key.startswith(rule_key))
