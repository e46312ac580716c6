"""Cross-checks of a settled `PPOConfig`; `trainer.compose` runs them before anything else starts."""

from __future__ import annotations

from typing import Any

import torch

from trainer.config import PPOConfig
from trainer.kl import get_kl_controller
from verl_like.errors import ConfigError, nearest
from workers.losses import LOSS_AGG_MODES, kl_penalty

CHOICES = {
    "actor_rollout_ref.actor.strategy": ("fsdp",),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": ("constant", "cosine", "linear"),
    "actor_rollout_ref.actor.loss_agg_mode": LOSS_AGG_MODES,
    "actor_rollout_ref.rollout.name": ("native",),
    "critic.strategy": ("fsdp",),
    "critic.loss_agg_mode": LOSS_AGG_MODES,
    "critic.optim.lr_scheduler_type": ("constant", "cosine", "linear"),
    "data.truncation": ("error", "left", "right"),
    "trainer.backend": ("ray", "local"),
    "trainer.device": ("auto", "cpu", "cuda"),
}
POSITIVE = (
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.grad_clip",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.train_batch_size",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.total_epochs",
)
TRACKERS = ("console",)


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
            raise ConfigError(f"{key}={value}: choose one of {', '.join(choices)}.{nearest(value, choices)}")
    for key in POSITIVE:
        if read(config, key) <= 0:
            raise ConfigError(f"{key}={read(config, key)}: it must be above 0.")
    for name in config.trainer.logger:
        if name not in TRACKERS:
            raise ConfigError(
                f"trainer.logger names {name!r}; there is {', '.join(TRACKERS)}, and metrics.jsonl is always written."
            )
    if not config.actor_rollout_ref.model.path:
        raise ConfigError("actor_rollout_ref.model.path is empty: give the folder of a model with its tokenizer.")
    if not config.data.train_files:
        raise ConfigError("data.train_files is empty: give a parquet or JSONL file, or a list of them.")
    steps = config.trainer.total_training_steps
    if steps is not None and steps <= 0:
        raise ConfigError(f"trainer.total_training_steps={steps}: it must be above 0, or null for epochs x batches.")
    if config.algorithm.adv_estimator == "remax":
        raise ConfigError("algorithm.adv_estimator=remax needs greedy baselines, which the driver does not generate.")
    get_kl_controller(config.algorithm.kl_ctrl)
    for estimator in (config.algorithm.kl_penalty, config.actor_rollout_ref.actor.kl_loss_type):
        kl_penalty(torch.zeros(1), torch.zeros(1), estimator)
    _check_batches(config)


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
