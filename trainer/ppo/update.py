"""The fourth stage: what critic and actor learn from, and how much entropy counts.

Samples may leave the losses, not the batch (cut by the length limit, without a score), tokens may
be weighed or rejected (`correct_rollout`), samples drawn anew by their scores (PF-PPO), and tokens
singled out for a loss. Rows of PTX are trained beside them.

PF-PPO: rewards are least reliable in the middle, so samples of high and low scores teach more
(arXiv 2409.06957). `clip_cov` and `kl_cov` compare a mini-batch's tokens with each other. The
driver has all of them, so it draws and chooses, and the workers read the column `chosen_tokens`:
neither the number of ranks nor the cut into micro-batches changes what is chosen.

`correct_rollout` takes a batch that has old log-probs and advantages, before anything is cut: a
rejected token is in no mini-batch's mask, so it is in no denominator either, at any number of
ranks. Advantages are estimated before, from all that was sampled. Under `bypass_mode` there is
nothing to compare yet, and the actor does it within its update.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.encoded_rows import LMRow
from trainer.data.files import row_limit
from trainer.data.lm_rows import lm_batch, read_lm_rows
from trainer.data.loader import RowLoader
from trainer.ppo.config import PolicyFiltrationConfig, PPOConfig
from verl_like.batch.protocol import DataProto
from workers.columns import drawn_from, read_columns, require, write_columns
from workers.config import ActorConfig, RolloutCorrectionConfig
from workers.losses.correction import RolloutCorrection, normalized
from workers.losses.registry import facts_of, get_policy_loss
from workers.losses.token_loss import arguments_for
from workers.rewards.weighted import SKIPPED
from workers.rollout.sample import CUT_BY_LENGTH

logger = logging.getLogger(__name__)
WithMetrics = tuple[DataProto, dict[str, float]]
LARGEST_ERROR = 1.0
"""Nats by which one step counts at most: a policy far from its target does not jump."""
ENTROPY_COEFF_LR = 0.1
"""How much of the distance to the target the log of the coefficient moves by in a step."""
RANGE = 100.0
"""How far the coefficient goes from its first value, up and down: it stays able to come back."""


@dataclass(frozen=True)
class Filter:
    """A step between the samples and what the losses see of them."""

    reason: str
    """Its key; the sample log has under it what the filter leaves out."""
    run: Callable[[DataProto], WithMetrics]


def filters(
    config: PPOConfig, step: int, balance: Callable[[DataProto], WithMetrics]
) -> list[Filter]:
    """The filters of this run, in their order; `balance` orders rows for the ranks."""
    algorithm, found = config.algorithm, []
    if algorithm.mask_truncated:
        found.append(Filter("algorithm.mask_truncated", without_truncated))
    found.append(Filter("on_failure=skip", lambda batch: (without_skipped(batch), {})))
    if columns_of_correction(algorithm.rollout_correction):
        correct = partial(correct_rollout, config=algorithm.rollout_correction)
        found.append(Filter("algorithm.rollout_correction", correct))
    if algorithm.use_pf_ppo:

        def resample(batch: DataProto) -> WithMetrics:
            batch, metrics = resample_by_score(batch, algorithm.pf_ppo, config.trainer.seed, step)
            return balance(batch)[0], metrics

        found.append(Filter("algorithm.use_pf_ppo", resample))
    return found


def choose_tokens_of(batch: DataProto, config: PPOConfig, step: int) -> DataProto:
    """The batch with the tokens that the run's policy loss singles out, if it does."""
    policy = config.actor_rollout_ref
    bypasses = config.algorithm.rollout_correction.bypass_mode
    return choose_tokens(
        batch,
        policy.actor,
        policy.actor.ppo_mini_batch_size * policy.rollout.n,
        config.trainer.seed,
        step,
        old_log_probs=drawn_from(batch.columns) if bypasses else "old_log_probs",
    )


def choose_tokens(
    batch: DataProto,
    actor: ActorConfig,
    mini_batch_size: int,
    seed: int,
    step: int,
    old_log_probs: str = "old_log_probs",
) -> DataProto:
    """Add the column `chosen_tokens` to the batch if the policy loss asks for it.

    Mini-batch k of K are the rows whose number leaves k when divided by K; `mini_batch_size` counts
    samples. `old_log_probs` names the column of the old policy's.
    """
    choose = facts_of(get_policy_loss(actor.policy_loss.loss_mode)).choose_tokens
    if choose is None:
        return batch

    arguments = arguments_for(choose, actor.policy_loss.args)
    columns = read_columns(batch, old_log_probs, "advantages", "response_mask")
    chosen = torch.zeros(columns["response_mask"].shape, dtype=torch.bool)
    count = max(len(batch) // mini_batch_size, 1)
    order = in_order_of_names(batch)
    for number in range(count):
        rows = order[order % count == number]
        draw = random.Random(f"chosen_tokens {seed} {step} {number}").getrandbits(63)
        generator = torch.Generator().manual_seed(draw)
        chosen[rows] = choose(
            *(column[rows] for column in columns.values()), generator, config=actor, **arguments
        )
    return write_columns(batch, chosen_tokens=chosen)


def without_truncated(batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """A batch whose `response_mask` is zero in truncated samples, and the share that they are.

    It shares its other columns with the one given. Every mini-batch counts its tokens and rows by
    that mask, so the losses divide by what is left.
    """
    require(batch, "finish_reason")
    reasons = batch.non_tensor_batch["finish_reason"]
    truncated = torch.tensor([reason == CUT_BY_LENGTH for reason in reasons], dtype=torch.bool)
    if truncated.all():
        logger.warning(
            "all %d samples of this step were cut by the length limit, and "
            "algorithm.mask_truncated leaves them out: the losses are zero. Raise "
            "data.max_response_length.",
            len(batch),
        )

    return _without(batch, truncated), {
        "response/truncated_ratio": truncated.double().mean().item()
    }


def without_skipped(batch: DataProto) -> DataProto:
    """A batch whose `response_mask` is zero in samples that `on_failure` of a reward skips."""
    if SKIPPED not in batch.non_tensor_batch:
        return batch
    return _without(batch, torch.tensor(batch.non_tensor_batch[SKIPPED] == 1.0))


def _without(batch: DataProto, left_out: Tensor) -> DataProto:
    mask = read_columns(batch, "response_mask")["response_mask"]
    return write_columns(batch.select(), response_mask=mask.masked_fill(left_out[:, None], 0))


def resample_by_score(
    batch: DataProto, config: PolicyFiltrationConfig, seed: int, step: int
) -> tuple[DataProto, dict[str, float]]:
    """As many rows, drawn by their scores, in the order of their names; and two metrics.

    Where all weights are zero, or all equal, every row stays once.
    """
    order = in_order_of_names(batch)
    scores = read_columns(batch, "token_level_scores")["token_level_scores"].sum(dim=-1)[order]
    weights = filtration_weights(scores, config.reweight_method, config.weight_pow)
    rows = draw_rows(weights, random.Random(f"pf_ppo {seed} {step}").random())

    kept, counts = rows.unique(return_counts=True)
    metrics = {
        "pf_ppo/kept_ratio": len(kept) / max(len(rows), 1),
        "pf_ppo/most_copies": float(counts.max()) if len(counts) else 0.0,
    }
    return batch[order[rows]], metrics


def in_order_of_names(batch: DataProto) -> Tensor:
    """The rows by uid and sample index: an order that does not depend on the number of ranks."""
    require(batch, "uid", "sample_index")
    uids = batch.non_tensor_batch["uid"].astype(str)
    index = read_columns(batch, "sample_index")["sample_index"].numpy()
    return torch.from_numpy(np.lexsort((index, uids)))


def filtration_weights(scores: Tensor, reweight_method: str, weight_pow: float = 2.0) -> Tensor:
    """What each sample's chance is proportional to, in float64: verl's three methods."""
    scores = scores.double()
    if reweight_method == "pow":
        return scores.abs() ** weight_pow
    highest = scores == scores.max()
    if reweight_method == "max_min":
        return (highest | (scores == scores.min())).double()
    return torch.where(highest, 0.4, 0.1).double()


def draw_rows(weights: Tensor, offset: float) -> Tensor:
    """As many row numbers as there are weights, ascending, by systematic sampling.

    One number `offset` in [0, 1) makes the whole draw: a row of share w of the weights is drawn
    n w times, rounded up or down.
    """
    total = weights.sum()
    if total <= 0:
        return torch.arange(len(weights))
    upto = (weights * (len(weights) / total)).cumsum(dim=0)
    places = torch.arange(len(weights), dtype=torch.float64) + offset
    drawn = torch.searchsorted(upto, places, right=True)
    last_possible = int(weights.nonzero()[-1])
    return drawn.clamp(max=last_possible)


def make_ptx_loader(config: PPOConfig, tokenizer: Any) -> RowLoader[LMRow] | None:
    """The loader of `ptx.train_files`, if there are any."""
    if not config.ptx.train_files:
        return None
    rows = read_lm_rows(
        "ptx.train_files",
        config.ptx.train_files,
        tokenizer,
        longest_row(config),
        on_bad_row=config.data.on_bad_row,
        limit=row_limit(config),
    )
    make_batch = partial(lm_batch, pad_token_id=tokenizer.pad_token_id)
    return RowLoader(rows, config.trainer.seed, make_batch)


def longest_row(config: PPOConfig) -> int:
    """Tokens of the longest row: by default those of a prompt with its response."""
    sample = config.data.max_prompt_length + config.data.max_response_length
    return config.ptx.max_length or sample


def rows_per_update(config: PPOConfig, num_prompts: int) -> int:
    """Rows of all optimizer steps of an `update_actor` on the samples of so many prompts."""
    actor = config.actor_rollout_ref.actor
    num_steps = max(num_prompts // actor.ppo_mini_batch_size, 1) * actor.ppo_epochs
    return num_steps * (config.ptx.batch_size or actor.ppo_mini_batch_size)


def columns_of_correction(config: RolloutCorrectionConfig) -> tuple[str, ...]:
    """The columns that `correct_rollout` writes: none without a correction, or if it bypasses."""
    if config.bypass_mode:
        return ()
    correction = RolloutCorrection.of(config)
    weights = ("rollout_is_weights",) if correction.weighs else ()
    return (*weights, "response_mask") if correction.rejects else weights


def correct_rollout(
    batch: DataProto, config: RolloutCorrectionConfig
) -> tuple[DataProto, dict[str, float]]:
    """The batch of an update: with importance weights, without the tokens that are rejected.

    The batch that is given keeps its mask. Without a correction it is returned as it is.
    """
    if not columns_of_correction(config):
        return batch, {}
    correction = RolloutCorrection.of(config)
    behaviour = drawn_from(batch.columns)
    columns = read_columns(batch, "old_log_probs", behaviour, "response_mask")
    mask = columns["response_mask"]

    gauge = correction.gauge()
    weights, kept = correction(columns["old_log_probs"], columns[behaviour], mask, gauge)
    metrics = gauge.metrics()
    batch = batch.select()
    if weights is not None:
        if config.rollout_is_batch_normalize:
            weights, mean = normalized(weights, mask.bool(), str(correction.level))
            metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean
        write_columns(batch, rollout_is_weights=weights)
    return write_columns(batch, response_mask=kept), metrics


class EntropyController:
    """The coefficient of the entropy bonus, whose logarithm follows the distance to a target.

    log c grows by 0.1 x (target - entropy): an entropy below the target makes the bonus weigh more
    (SAC, arXiv 1812.05905). Without a target it stays.
    """

    def __init__(self, actor: ActorConfig) -> None:
        """Start at `actor.entropy_coeff`, which is above 0 where there is a target."""
        self.value = actor.entropy_coeff
        self.target = actor.target_entropy
        self.bounds = self.value / RANGE, self.value * RANGE

    def update(self, entropy: float) -> dict[str, float]:
        """Move after an update whose tokens had this mean entropy; gives what the update used.

        An entropy of 0 is that of no tokens, or of no update, and moves nothing.
        """
        if self.target is None:
            return {}
        metrics = {"actor/entropy_coeff": self.value}
        if math.isfinite(entropy) and entropy > 0:
            error = min(max(self.target - entropy, -LARGEST_ERROR), LARGEST_ERROR)
            low, high = self.bounds
            self.value = min(max(self.value * math.exp(ENTROPY_COEFF_LR * error), low), high)
        return metrics

    def state_dict(self) -> dict[str, float]:
        """The coefficient, as the actor gets it and a checkpoint keeps it; empty if it stays."""
        return {} if self.target is None else {"entropy_coeff": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's coefficient; one of a run without a target has none."""
        if self.target is not None:
            self.value = state.get("entropy_coeff", self.value)
