"""Keys that the user set and that nothing chosen reads: an error, or for verl's usual ones a
notice.

`trainer.config.compose` calls `check_unread`. A rule says under which condition a part of the tree
is read, and otherwise why not; a key without a rule is always read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from trainer.config.schema import PPOConfig
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
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "trainer.critic_warmup",
        "data.val_files",
        "trainer.total_epochs",
        "trainer.max_ckpt_to_keep",
    }
)
"""Keys of verl's split-placement command, which must compose whatever else is set."""


class Rule:
    """Its keys are read where `holds`; `why` says what is missing elsewhere.

    A key with a dot at its end stands for what is in that section, one that holds names of the
    user's own for these.
    """

    def __init__(self, holds: Callable[[PPOConfig], bool], why: str, *keys: str) -> None:
        """One reason for all its keys."""
        self.holds, self.why, self.keys = holds, why, keys

    def covers(self, key: str) -> bool:
        """Whether it is about this key of the user's."""
        return any(key == own or key.startswith(own.removesuffix(".") + ".") for own in self.keys)


def _has_critic(config: PPOConfig) -> bool:
    return "critic" in config.role_mapping


def _validates(config: PPOConfig) -> bool:
    return bool(config.data.val_files) and (
        config.trainer.val_before_train or config.trainer.test_freq > 0
    )


def _estimator(config: PPOConfig) -> Callable[..., Any]:
    from trainer.ppo.advantages.estimators import ADVANTAGE_ESTIMATORS

    return ADVANTAGE_ESTIMATORS.look_up(config.algorithm.adv_estimator)


def _optimizer(config: PPOConfig) -> Callable[..., Any]:
    from workers.training.optim import OPTIMIZERS

    optimizer: Callable[..., Any] = OPTIMIZERS.look_up(
        config.actor_rollout_ref.actor.optim.optimizer
    )
    return optimizer


def _takes(
    parameter: str, chosen: Callable[[PPOConfig], Callable[..., Any]]
) -> Callable[[PPOConfig], bool]:
    return lambda config: parameter in inspect.signature(chosen(config)).parameters


def _loss_is_none_of(*names: str) -> Callable[[PPOConfig], bool]:
    return lambda config: config.actor_rollout_ref.actor.policy_loss.loss_mode not in names


def _rules_score(config: PPOConfig) -> bool:
    only_model = config.reward_model.enable and config.reward_model.rule_weight == 0
    return not only_model or bool(config.custom_reward_function.path)


def _rollout_travels(config: PPOConfig) -> bool:
    from verl_like.placement.pools import expand_roles

    pools = expand_roles(config.role_mapping)
    return pools["actor"] != pools["rollout"]


MODEL, ACTOR, ROLLOUT = (
    f"actor_rollout_ref.{section}." for section in ("model", "actor", "rollout")
)
RULES = (
    Rule(
        _has_critic,
        "this run has no critic: algorithm.adv_estimator takes no values",
        *("critic.", "trainer.critic_warmup"),
    ),
    Rule(
        lambda c: c.algorithm.use_kl_in_reward or c.actor_rollout_ref.actor.use_kl_loss,
        "this run has no reference: set algorithm.use_kl_in_reward or "
        "actor_rollout_ref.actor.use_kl_loss",
        "actor_rollout_ref.ref.",
    ),
    Rule(
        lambda c: c.actor_rollout_ref.model.lora_rank > 0,
        "model.lora_rank is 0",
        *(MODEL + "lora_alpha", MODEL + "target_modules"),
    ),
    *(
        Rule(_takes(name, _optimizer), "the optimizer does not take it", f"{ACTOR}optim.{name}")
        for name in ("betas", "eps", "weight_decay")
    ),
    Rule(
        lambda c: c.actor_rollout_ref.actor.optim.lr_scheduler_type != "constant",
        "lr_scheduler_type=constant stays at the peak",
        ACTOR + "optim.min_lr_ratio",
    ),
    Rule(
        lambda c: (
            c.actor_rollout_ref.actor.clip_ratio_low is None
            or c.actor_rollout_ref.actor.clip_ratio_high is None
        ),
        "clip_ratio_low and clip_ratio_high are both set and replace it",
        ACTOR + "clip_ratio",
    ),
    Rule(
        _loss_is_none_of("reinforce"),
        "policy_loss.loss_mode=reinforce clips nothing",
        *(ACTOR + "clip_ratio", ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high"),
    ),
    Rule(
        _loss_is_none_of("reinforce", "gspo", "cispo"),
        "of the built-in losses only policy_loss.loss_mode=vanilla reads it",
        ACTOR + "clip_ratio_c",
    ),
    Rule(
        lambda c: c.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum-norm",
        "only loss_agg_mode=seq-mean-token-sum-norm reads it",
        ACTOR + "loss_scale_factor",
    ),
    Rule(
        lambda c: c.actor_rollout_ref.actor.use_kl_loss,
        "actor.use_kl_loss is false",
        *(ACTOR + "kl_loss_coef", ACTOR + "kl_loss_type"),
    ),
    Rule(
        lambda c: c.actor_rollout_ref.actor.use_dynamic_bsz,
        "actor.use_dynamic_bsz is false",
        *(ACTOR + "ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"),
    ),
    Rule(
        lambda c: not c.actor_rollout_ref.actor.use_dynamic_bsz,
        "actor.use_dynamic_bsz cuts batches by ppo_max_token_len_per_gpu",
        *(ACTOR + "ppo_micro_batch_size_per_gpu", ROLLOUT + "log_prob_micro_batch_size_per_gpu"),
        *(
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
            "critic.ppo_micro_batch_size_per_gpu",
        ),
    ),
    Rule(
        lambda c: c.actor_rollout_ref.rollout.name == "vllm",
        "only rollout.name=vllm reads it",
        *(
            ROLLOUT + name
            for name in ("tensor_model_parallel_size", "gpu_memory_utilization", "engine_kwargs")
        ),
    ),
    Rule(
        lambda c: c.actor_rollout_ref.rollout.name != "hf",
        "rollout.name=hf does not read it",
        *(ROLLOUT + "max_num_seqs", ROLLOUT + "kv_cache_gb"),
    ),
    Rule(
        lambda c: c.actor_rollout_ref.rollout.do_sample,
        "rollout.do_sample=false decodes greedily",
        *(ROLLOUT + "top_k", ROLLOUT + "top_p"),
    ),
    Rule(
        _rollout_travels,
        "actor and rollout share their processes: weights do not travel in pieces",
        ROLLOUT + "update_weights_bucket_megabytes",
    ),
    Rule(
        _validates,
        "this run never validates: set data.val_files, and trainer.test_freq or "
        "trainer.val_before_train",
        ROLLOUT + "val_kwargs.",
    ),
    Rule(
        lambda c: c.actor_rollout_ref.rollout.val_kwargs.do_sample,
        "val_kwargs.do_sample=false decodes greedily",
        *(f"{ROLLOUT}val_kwargs.{name}" for name in ("temperature", "top_k", "top_p")),
    ),
    Rule(
        _validates,
        "this run never validates: set trainer.test_freq or trainer.val_before_train",
        "data.val_files",
    ),
    Rule(
        lambda c: bool(c.data.val_files) or c.trainer.test_freq <= 0,
        "there are no data.val_files",
        "trainer.test_freq",
    ),
    Rule(
        lambda c: bool(c.data.val_files) or not c.trainer.val_before_train,
        "there are no data.val_files",
        "trainer.val_before_train",
    ),
    Rule(
        lambda c: bool(c.data.custom_cls.path),
        "there is no data.custom_cls.path",
        "data.custom_cls.name",
    ),
    *(
        Rule(
            _takes(name, _estimator),
            "algorithm.adv_estimator does not take it",
            f"algorithm.{name}",
        )
        for name in ("gamma", "lam", "norm_adv_by_std_in_grpo")
    ),
    Rule(
        lambda c: c.algorithm.use_kl_in_reward,
        "algorithm.use_kl_in_reward is false",
        *("algorithm.kl_penalty", "algorithm.kl_ctrl."),
    ),
    Rule(
        lambda c: c.algorithm.kl_ctrl.type == "adaptive",
        "kl_ctrl.type is not adaptive",
        *("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
    ),
    Rule(
        lambda c: c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable is false",
        *("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"),
    ),
    Rule(
        lambda c: c.algorithm.rollout_correction.rollout_is is not None,
        "algorithm.rollout_correction.rollout_is is not set",
        *(f"algorithm.rollout_correction.rollout_is_{name}" for name in ("threshold", "mode")),
    ),
    Rule(
        lambda c: bool(c.custom_reward_function.path),
        "there is no path",
        *("custom_reward_function.name", "custom_reward_function.reward_kwargs"),
    ),
    Rule(
        lambda c: c.reward_model.enable,
        "reward_model.enable is false",
        *(f"reward_model.{name}" for name in ("rule_weight", "model.", "micro_batch_size_per_gpu")),
    ),
    Rule(
        _rules_score,
        "rule_weight=0 leaves the score to the model",
        *("reward_model.default_score", "reward_model.sample_timeout_s"),
    ),
    Rule(
        lambda c: c.reward_model.overlong_buffer.enable,
        "its enable is false",
        *("reward_model.overlong_buffer.len", "reward_model.overlong_buffer.penalty_factor"),
    ),
    Rule(
        lambda c: c.trainer.save_freq > 0,
        "trainer.save_freq writes no checkpoints",
        *(
            "trainer.max_ckpt_to_keep",
            ACTOR + "checkpoint.save_contents",
            "critic.checkpoint.save_contents",
        ),
    ),
    Rule(
        lambda c: c.trainer.resume_mode == "resume_path",
        "trainer.resume_mode is not resume_path",
        "trainer.resume_from_path",
    ),
    Rule(
        lambda c: c.trainer.total_training_steps is None,
        "trainer.total_training_steps is set",
        "trainer.total_epochs",
    ),
    Rule(
        lambda c: c.trainer.backend == "ray",
        "trainer.backend is not ray",
        *("ray.", "cpus_per_process"),
    ),
)


def check_unread(config: PPOConfig, keys: Iterable[str]) -> list[str]:
    """Notices on those of the user's `keys` that have no effect here; refuses the others that
    nothing reads.
    """
    notices = []
    for key in keys:
        why = next(
            (rule.why for rule in RULES if rule.covers(key) and not rule.holds(config)), None
        )
        if why is None:
            continue
        if key not in NO_EFFECT_HERE:
            raise ConfigError(
                f"{key} is set, but nothing reads it in this run: {why}. Drop it, or change that."
            )
        notices.append(f"notice: {key} has no effect here: {why}")
    return notices
