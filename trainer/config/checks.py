"""Cross-checks of a settled `PPOConfig`; `trainer.config.compose` runs them before anything else
starts.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.config.schema import PPOConfig
from trainer.ppo.kl import get_kl_controller
from trainer.run_folder.tracking import TRACKERS
from verl_like.errors import ConfigError, nearest
from workers.config import SAVE_CONTENTS
from workers.losses.losses import (
    LOSS_AGG_MODES,
    compute_rollout_importance_weights,
    get_policy_loss,
    kl_penalty,
)
from workers.parallel.fsdp import STRATEGIES, settle
from workers.rollout.base import check_sampling_kwargs
from workers.rollout.build import ENGINES
from workers.training.optim import OPTIMIZERS

CHOICES = {
    "actor_rollout_ref.actor.strategy": STRATEGIES,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": ("constant", "cosine", "linear"),
    "actor_rollout_ref.actor.loss_agg_mode": LOSS_AGG_MODES,
    "actor_rollout_ref.rollout.name": ENGINES,
    "critic.strategy": STRATEGIES,
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "data.truncation": ("error", "left", "right"),
    "data.on_bad_row": ("error", "skip"),
    "trainer.backend": ("ray", "local"),
    "trainer.device": ("auto", "cpu", "cuda"),
}
POSITIVE = (
    "algorithm.filter_groups.max_num_gen_batches",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.kv_cache_gb",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.temperature",
    "critic.ppo_micro_batch_size_per_gpu",
    "reward_model.micro_batch_size_per_gpu",
    "critic.grad_clip",
    "critic.cliprange_value",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.train_batch_size",
    "reward_model.sample_timeout_s",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.total_epochs",
)
NOT_NEGATIVE = (
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.optim.weight_decay",
    "actor_rollout_ref.actor.kl_loss_coef",
    "critic.optim.lr",
    "trainer.critic_warmup",
)


def read(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def validate(config: PPOConfig) -> None:
    """Refuse, with the numbers and the way out, a configuration that cannot work."""
    for key, choices in CHOICES.items():
        value = read(config, key)
        if value not in choices:
            raise ConfigError(
                f"{key}={value}: choose one of {', '.join(choices)}.{nearest(value, choices)}"
            )
    for key in POSITIVE:
        if read(config, key) <= 0:
            raise ConfigError(f"{key}={read(config, key)}: it must be above 0.")
    for key in NOT_NEGATIVE:
        if read(config, key) < 0:
            raise ConfigError(f"{key}={read(config, key)}: it must be 0 or above.")
    for name in config.trainer.logger:
        if name not in TRACKERS:
            raise ConfigError(
                f"trainer.logger names {name!r}; there is {', '.join(TRACKERS)}, and "
                f"metrics.jsonl is always written.{nearest(name, TRACKERS)}"
            )
    if not config.actor_rollout_ref.model.path:
        raise ConfigError(
            "actor_rollout_ref.model.path is empty: give the folder of a model with its tokenizer."
        )
    if not config.data.train_files:
        raise ConfigError(
            "data.train_files is empty: give a parquet or JSONL file, or a list of them."
        )
    steps = config.trainer.total_training_steps
    if steps is not None and steps <= 0:
        raise ConfigError(
            f"trainer.total_training_steps={steps}: it must be above 0, or null for epochs x "
            "batches."
        )
    clip = config.algorithm.score_clip
    if clip is not None and clip <= 0:
        raise ConfigError(
            f"algorithm.score_clip={clip}: it must be above 0, or null to leave scores as they are."
        )
    get_kl_controller(config.algorithm.kl_ctrl)
    for estimator in (config.algorithm.kl_penalty, config.actor_rollout_ref.actor.kl_loss_type):
        kl_penalty(torch.zeros(1), torch.zeros(1), estimator)
    _check_checkpoints(config)
    _check_rewards(config)
    _check_batches(config)
    _check_token_budgets(config)
    _check_losses(config)
    check_sampling_kwargs(
        config.actor_rollout_ref.rollout.sampling_kwargs, config.data.max_response_length
    )
    actor = config.actor_rollout_ref.actor
    settle(actor.strategy, actor.fsdp_config, "actor_rollout_ref.actor.fsdp_config")
    settle(
        actor.strategy,
        config.actor_rollout_ref.ref.fsdp_config,
        "actor_rollout_ref.ref.fsdp_config",
    )
    settle(config.critic.strategy, config.critic.model.fsdp_config, "critic.model.fsdp_config")


def _check_losses(config: PPOConfig) -> None:
    """What the actor's loss and the optimizers would refuse when they are made or at their first
    step.
    """
    OPTIMIZERS.look_up(config.actor_rollout_ref.actor.optim.optimizer)
    get_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    correction, zero = config.algorithm.rollout_correction, torch.zeros(1, 1)
    if correction.rollout_is is not None:
        compute_rollout_importance_weights(zero, zero, zero, **vars(correction))


def _check_rewards(config: PPOConfig) -> None:
    """Scores and validations that are asked for can be had."""
    if config.reward_model.enable and not config.reward_model.model.path:
        raise ConfigError(
            "reward_model.enable=true needs reward_model.model.path: the folder of a sequence "
            "classifier."
        )
    buffer, limit = config.reward_model.overlong_buffer, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= limit:
        raise ConfigError(
            f"reward_model.overlong_buffer.len={buffer.len} tokens: it lies between 1 and "
            f"data.max_response_length={limit}; DAPO takes a fifth of that."
        )
    if config.data.custom_cls.path and not config.data.custom_cls.name:
        raise ConfigError(
            f"data.custom_cls.path={config.data.custom_cls.path} needs data.custom_cls.name."
        )
    if config.trainer.test_freq == 0 or config.trainer.test_freq < -1:
        raise ConfigError(
            f"trainer.test_freq={config.trainer.test_freq}: a number of steps above 0, or -1 for "
            "none between steps."
        )


def _check_token_budgets(config: PPOConfig) -> None:
    """A micro-batch holds at least one sample of full length."""
    policy, critic = config.actor_rollout_ref, config.critic
    if not policy.actor.use_dynamic_bsz:
        return
    longest = config.data.max_prompt_length + config.data.max_response_length
    budgets = {
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": policy.actor.ppo_max_token_len_per_gpu,
        "critic.ppo_max_token_len_per_gpu": critic.ppo_max_token_len_per_gpu,
    }
    for key, tokens in budgets.items():
        if tokens is not None and tokens < longest:
            raise ConfigError(
                f"{key}={tokens} tokens is less than one sample of data.max_prompt_length + "
                f"data.max_response_length = {longest} tokens; raise it to that."
            )


def _check_checkpoints(config: PPOConfig) -> None:
    trainer = config.trainer
    if trainer.save_freq == 0 or trainer.save_freq < -1:
        raise ConfigError(
            f"trainer.save_freq={trainer.save_freq}: a number of steps above 0, or -1 for no "
            "checkpoints."
        )
    if trainer.max_ckpt_to_keep is not None and trainer.max_ckpt_to_keep < 1:
        raise ConfigError(
            f"trainer.max_ckpt_to_keep={trainer.max_ckpt_to_keep}: 1 or more, or null to keep all."
        )
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        raise ConfigError(
            f"trainer.resume_mode={trainer.resume_mode} and "
            f"trainer.resume_from_path={trainer.resume_from_path}: resume_mode=resume_path and a "
            "global_step_N folder go together; set both or neither."
        )
    contents = {
        "actor_rollout_ref.actor": config.actor_rollout_ref.actor.checkpoint.save_contents,
        "critic": config.critic.checkpoint.save_contents,
    }
    for section, names in contents.items():
        for name in names:
            if name not in SAVE_CONTENTS:
                raise ConfigError(
                    f"{section}.checkpoint.save_contents names {name!r}; choose among "
                    f"{', '.join(SAVE_CONTENTS)}.{nearest(name, SAVE_CONTENTS)}"
                )


def _check_batches(config: PPOConfig) -> None:
    total = config.data.train_batch_size
    mini_batches = {
        "actor_rollout_ref.actor.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size,
        "critic.ppo_mini_batch_size": config.critic.ppo_mini_batch_size,
    }
    for key, size in mini_batches.items():
        if size is None or (size > 0 and total % size == 0):
            continue
        divisors = [d for d in range(1, total + 1) if total % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(d - size))[:2])
        raise ConfigError(
            f"{key}={size} prompts does not divide data.train_batch_size={total} prompts; "
            f"the nearest values that do are {' and '.join(map(str, near))}."
        )
