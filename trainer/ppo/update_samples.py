"""The samples that an update trains on: what is left of a batch, corrected for the rollout.

Samples may leave the losses (`left_out`), tokens may be weighed or rejected (`correct_rollout`),
samples drawn anew by their scores (`policy_filtration`), and tokens singled out for a loss.

`clip_cov` and `kl_cov` compare a mini-batch's tokens with each other. The driver has all of them,
so it chooses, and the workers read the column `chosen_tokens`: neither the number of ranks nor the
cut into micro-batches changes what is chosen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from trainer.ppo.config import PPOConfig
from trainer.ppo.correct_rollout import correct_rollout
from trainer.ppo.left_out import without_skipped, without_truncated
from trainer.ppo.policy_filtration import in_order_of_names, resample_by_score
from workers.columns import drawn_from, read_columns, write_columns
from workers.losses.registry import get_policy_loss, token_chooser

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

WithMetrics = tuple["DataProto", dict[str, float]]


def samples_of_update(
    batch: DataProto, config: PPOConfig, step: int, balance: Callable[[DataProto], WithMetrics]
) -> WithMetrics:
    """What `PPOTrainer.update` hands to critic and actor; `balance` orders rows for the ranks."""
    algorithm, policy = config.algorithm, config.actor_rollout_ref
    metrics: dict[str, float] = {}
    if algorithm.mask_truncated:
        batch, metrics = without_truncated(batch)
    batch, corrected = correct_rollout(without_skipped(batch), algorithm.rollout_correction)
    metrics |= corrected

    if algorithm.use_pf_ppo:
        batch, drawn = resample_by_score(batch, algorithm.pf_ppo, config.trainer.seed, step)
        batch, _ = balance(batch)
        metrics |= drawn

    bypasses = algorithm.rollout_correction.bypass_mode
    assert batch.batch is not None, "samples have columns"
    return choose_tokens(
        batch,
        policy.actor.policy_loss.loss_mode,
        policy.actor.ppo_mini_batch_size * policy.rollout.n,
        config.trainer.seed,
        step,
        old_log_probs=drawn_from(batch.batch) if bypasses else "old_log_probs",
    ), metrics


def choose_tokens(
    batch: DataProto,
    loss_mode: str,
    mini_batch_size: int,
    seed: int,
    step: int,
    old_log_probs: str = "old_log_probs",
) -> DataProto:
    """The same batch, with the column `chosen_tokens` if the policy loss asks for it.

    Mini-batch k of K are the rows whose number leaves k when divided by K; `mini_batch_size` counts
    samples. `old_log_probs` names the column of the old policy's.
    """
    choose = token_chooser(get_policy_loss(loss_mode))
    if choose is None:
        return batch

    columns = read_columns(batch, old_log_probs, "advantages", "response_mask")
    chosen = torch.zeros(columns["response_mask"].shape, dtype=torch.bool)
    count = max(len(batch) // mini_batch_size, 1)
    order = in_order_of_names(batch)
    for number in range(count):
        rows = order[order % count == number]
        draw = random.Random(f"chosen_tokens {seed} {step} {number}").getrandbits(63)
        generator = torch.Generator().manual_seed(draw)
        chosen[rows] = choose(*(column[rows] for column in columns.values()), generator)
    return write_columns(batch, chosen_tokens=chosen)
