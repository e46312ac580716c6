"""PPO's rules between fields: sizes that must divide, parts that must exist, clashing settings.

The rules of one field stand at the field, and `trainer.config.checks` reads them there.
"""

from __future__ import annotations

import torch

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, needs_groups
from trainer.ppo.config import PPOConfig
from trainer.ppo.kl import get_kl_controller
from trainer.ppo.ptx import longest_row
from verl_like.errors import ConfigError
from workers.losses.correction import compute_rollout_importance_weights
from workers.parallel.fsdp import settle
from workers.rollout.base import check_sampling_kwargs


def validate(config: PPOConfig) -> None:
    """Refuse, with the numbers and the way out, settings that cannot work together."""
    get_kl_controller(config.algorithm.kl_ctrl)
    _check_rewards(config)
    _check_data(config)
    _check_mini_batches(config)
    _check_token_budgets(config)
    _check_ptx(config)
    _check_groups(config)
    _check_correction(config)
    _check_sharding(config)
    check_sampling_kwargs(
        config.actor_rollout_ref.rollout.sampling_kwargs, config.data.max_response_length
    )


def _check_rewards(config: PPOConfig) -> None:
    """Scores that are asked for can be had."""
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


def _check_data(config: PPOConfig) -> None:
    custom = config.data.custom_cls
    if custom.path and not custom.name:
        raise ConfigError(f"data.custom_cls.path={custom.path} needs data.custom_cls.name.")


def _check_mini_batches(config: PPOConfig) -> None:
    """A step's prompts are cut into whole mini-batches."""
    total = config.data.train_batch_size
    policy, critic = config.actor_rollout_ref, config.critic
    mini_batches = {
        "actor_rollout_ref.actor.ppo_mini_batch_size": policy.actor.ppo_mini_batch_size,
        "critic.ppo_mini_batch_size": critic.ppo_mini_batch_size,
    }
    for key, size in mini_batches.items():
        if size is None or (size > 0 and total % size == 0):
            continue
        near = " and ".join(map(str, _nearest_divisors(total, size)))
        raise ConfigError(
            f"{key}={size} prompts does not divide data.train_batch_size={total} prompts; "
            f"the nearest values that do are {near}."
        )


def _nearest_divisors(total: int, size: int) -> list[int]:
    divisors = [number for number in range(1, total + 1) if total % number == 0]
    by_distance = sorted(divisors, key=lambda divisor: abs(divisor - size))
    return sorted(by_distance[:2])


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


def _check_ptx(config: PPOConfig) -> None:
    """A row of PTX fits into a pass."""
    actor, longest = config.actor_rollout_ref.actor, longest_row(config)
    if config.ptx.train_files and actor.use_dynamic_bsz:
        budget = actor.ppo_max_token_len_per_gpu
        if longest > budget:
            raise ConfigError(
                f"ptx.max_length={longest} tokens does not fit into a pass of "
                f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget} tokens; lower the "
                "one, or raise the other."
            )


def _check_groups(config: PPOConfig) -> None:
    """An estimator that compares a prompt's samples has more than one of them."""
    name, num_samples = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    estimator = ADVANTAGE_ESTIMATORS.get(name)  # of the user's own, by its path, nothing is known
    if num_samples < 2 and estimator is not None and needs_groups(estimator):
        raise ConfigError(
            f"algorithm.adv_estimator={name} compares the samples of a prompt with each other, and "
            f"actor_rollout_ref.rollout.n={num_samples} makes one: its advantage would be its raw "
            "score. Set actor_rollout_ref.rollout.n to 2 or more, or take reinforce_plus_plus."
        )


def _check_correction(config: PPOConfig) -> None:
    """What the importance weights would refuse at their first step."""
    correction, zero = config.algorithm.rollout_correction, torch.zeros(1, 1)
    if correction.rollout_is is not None:
        compute_rollout_importance_weights(zero, zero, zero, **vars(correction))


def _check_sharding(config: PPOConfig) -> None:
    """A strategy and the `fsdp_config` beside it do not contradict each other."""
    policy, critic = config.actor_rollout_ref, config.critic
    strategy = policy.actor.strategy
    settle(strategy, policy.actor.fsdp_config, "actor_rollout_ref.actor.fsdp_config")
    settle(strategy, policy.ref.fsdp_config, "actor_rollout_ref.ref.fsdp_config")
    settle(critic.strategy, critic.model.fsdp_config, "critic.model.fsdp_config")
