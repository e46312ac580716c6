"""The fourth stage: filters for the samples that critic and actor train on, and the entropy bonus.

Filters change the batch before the losses see it:

- truncated samples, or samples without a score, are masked out
- tokens are weighted or rejected (`correct_rollout`)
- samples are resampled by their scores (PF-PPO)

Tokens may also be chosen for the policy loss, and PTX rows are trained on in the same update.

PF-PPO draws samples by score, because rewards are least reliable in the middle (arXiv 2409.06957).
The losses `clip_cov` and `kl_cov` compare the tokens of a mini-batch with each other. The driver
has all tokens, so it chooses, and the workers read the column `chosen_tokens`. The choice therefore
depends neither on the number of ranks nor on the split into micro-batches.

`correct_rollout` acts on the whole batch before it is split. A rejected token is therefore in no
mini-batch's mask and in no denominator, at any number of ranks. Advantages are estimated earlier,
from all samples. Under `bypass_mode` there are no old log-probs yet, so the actor corrects within
its update.
"""

from __future__ import annotations

import logging
import math
import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.files import row_limit
from trainer.data.lm_rows import LMRow, lm_batch, read_lm_rows
from trainer.data.loader import RowLoader
from trainer.ppo.compute_advantage import truncated_rows
from trainer.ppo.config import PolicyFiltrationConfig, PPOConfig
from verl_like.batch.protocol import DataProto
from verl_like.config_key import arguments_for
from workers.columns import (
    read_column,
    read_columns,
    require,
    sample_scores,
    sampled_log_probs_column,
    write_columns,
)
from workers.config import ActorConfig, RolloutCorrectionConfig
from workers.losses.correction import RolloutCorrection, normalized
from workers.losses.registry import get_policy_loss, traits_of
from workers.rewards.weighted import SKIPPED

logger = logging.getLogger(__name__)
LARGEST_ERROR = 1.0
"""Distances of the entropy to its target are clipped to this many nats."""
ENTROPY_COEFF_LR = 0.1
"""Change of the log-coefficient per step and nat of distance."""
RANGE = 100.0
"""The coefficient stays within `actor.entropy_coeff` divided and multiplied by this factor."""


def add_chosen_tokens(batch: DataProto, config: PPOConfig, step: int) -> DataProto:
    """Add the column `chosen_tokens` to the batch if the policy loss reads it.

    Mini-batch k of K has the rows whose index is k modulo K.
    """
    policy, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    choose = traits_of(get_policy_loss(actor.policy_loss.loss_mode)).choose_tokens
    if choose is None:
        return batch

    bypasses = config.algorithm.rollout_correction.bypass_mode
    old_log_probs = sampled_log_probs_column(batch.columns) if bypasses else "old_log_probs"
    columns = read_columns(batch, old_log_probs, "advantages", "response_mask")
    arguments = arguments_for(choose, actor.policy_loss.args)
    chosen = torch.zeros(columns["response_mask"].shape, dtype=torch.bool)
    count = max(len(batch) // (actor.ppo_mini_batch_size * policy.rollout.n), 1)
    order = in_order_of_names(batch)
    for number in range(count):
        rows = order[order % count == number]
        seed = f"chosen_tokens {config.trainer.seed} {step} {number}"
        generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
        chosen[rows] = choose(
            *(column[rows] for column in columns.values()), generator, config=actor, **arguments
        )
    return write_columns(batch, chosen_tokens=chosen)


def without_truncated(batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """Return a batch whose `response_mask` is zero in truncated samples, and their fraction.

    The other columns are shared with the argument. Mini-batches count tokens and rows by that mask,
    so the losses average over the remaining samples.
    """
    truncated = truncated_rows(batch)
    if truncated.all():
        logger.warning(
            "all %d samples of this step were truncated at the length limit, and "
            "algorithm.mask_truncated leaves them out, so the losses are zero. Raise "
            "data.max_response_length.",
            len(batch),
        )

    return _without(batch, truncated), {
        "response/truncated_ratio": truncated.double().mean().item()
    }


def without_skipped(batch: DataProto) -> DataProto:
    """Return a batch whose `response_mask` is zero in samples that `on_failure` skips."""
    if SKIPPED not in batch.non_tensor_batch:
        return batch
    return _without(batch, torch.tensor(batch.non_tensor_batch[SKIPPED] == 1.0))


def _without(batch: DataProto, left_out: Tensor) -> DataProto:
    mask = read_column(batch, "response_mask")
    return write_columns(batch.select(), response_mask=mask.masked_fill(left_out[:, None], 0))


def resample_by_score(
    batch: DataProto, config: PolicyFiltrationConfig, seed: int, step: int
) -> tuple[DataProto, dict[str, float]]:
    """Return a batch of the same size with rows drawn by score, in order of uid, and two metrics.

    If all weights are zero, or all are equal, every row is drawn once.
    """
    order = in_order_of_names(batch)
    scores = sample_scores(batch)[order]
    weights = filtration_weights(scores, config.reweight_method, config.weight_pow)
    rows = draw_rows(weights, random.Random(f"pf_ppo {seed} {step}").random())

    distinct, counts = rows.unique(return_counts=True)
    metrics = {
        "pf_ppo/kept_ratio": len(distinct) / max(len(rows), 1),
        "pf_ppo/most_copies": float(counts.max()) if len(counts) else 0.0,
    }
    return batch[order[rows]], metrics


def in_order_of_names(batch: DataProto) -> Tensor:
    """Return row indices by uid and sample index, an order independent of the number of ranks."""
    require(batch, "uid", "sample_index")
    uids = batch.non_tensor_batch["uid"].astype(str)
    index = read_column(batch, "sample_index").numpy()
    return torch.from_numpy(np.lexsort((index, uids)))


def filtration_weights(scores: Tensor, reweight_method: str, weight_pow: float = 2.0) -> Tensor:
    """Return each sample's unnormalized probability in float64, by one of verl's three methods."""
    scores = scores.double()
    if reweight_method == "pow":
        return scores.abs() ** weight_pow
    highest = scores == scores.max()
    if reweight_method == "max_min":
        return (highest | (scores == scores.min())).double()
    return torch.where(highest, 0.4, 0.1).double()


def draw_rows(weights: Tensor, offset: float) -> Tensor:
    """Draw as many row indices as there are weights by systematic sampling; return them sorted.

    One number `offset` in [0, 1) determines the whole draw. Of n rows, a row whose fraction of the
    total weight is w is drawn n w times, rounded up or down.
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
    """Return the loader of `ptx.train_files`, or None if there are no such files."""
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
    """Return the maximum length of a PTX row; by default, that of a prompt with its response."""
    sample = config.data.max_prompt_length + config.data.max_response_length
    return config.ptx.max_length or sample


def rows_per_update(config: PPOConfig, num_prompts: int) -> int:
    """Return the number of PTX rows that one `update_actor` on `num_prompts` prompts trains on."""
    actor = config.actor_rollout_ref.actor
    num_steps = max(num_prompts // actor.ppo_mini_batch_size, 1) * actor.ppo_epochs
    return num_steps * (config.ptx.batch_size or actor.ppo_mini_batch_size)


def columns_of_correction(config: RolloutCorrectionConfig) -> tuple[str, ...]:
    """Return the columns that `correct_rollout` writes: none if it is off or bypassed."""
    if config.bypass_mode:
        return ()
    correction = RolloutCorrection.of(config)
    weights = ("rollout_is_weights",) if correction.weighs else ()
    return (*weights, "response_mask") if correction.rejects else weights


def correct_rollout(
    batch: DataProto, config: RolloutCorrectionConfig
) -> tuple[DataProto, dict[str, float]]:
    """Add importance weights to the batch, and mask out rejected tokens.

    `batch` is not changed; without a configured correction, it is returned as is.
    """
    if not columns_of_correction(config):
        return batch, {}
    correction = RolloutCorrection.of(config)
    behavior = sampled_log_probs_column(batch.columns)
    columns = read_columns(batch, "old_log_probs", behavior, "response_mask")
    mask = columns["response_mask"]

    gauge = correction.gauge()
    weights, accepted = correction(columns["old_log_probs"], columns[behavior], mask, gauge)
    metrics = gauge.metrics()
    batch = batch.select()
    if weights is not None:
        if config.rollout_is_batch_normalize:
            weights, mean = normalized(weights, mask.bool(), str(correction.level))
            metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean
        write_columns(batch, rollout_is_weights=weights)
    return write_columns(batch, response_mask=accepted), metrics


class EntropyController:
    """The coefficient of the entropy bonus, which steers the entropy to a target.

    Its logarithm grows by 0.1 x (target - entropy), within limits: an entropy below the target
    increases the bonus (SAC, arXiv 1812.05905). Without a target the coefficient is constant.
    """

    def __init__(self, actor: ActorConfig) -> None:
        """Start at `actor.entropy_coeff`, which is above 0 if there is a target."""
        self.value = actor.entropy_coeff
        self.target = actor.target_entropy
        self.bounds = self.value / RANGE, self.value * RANGE

    def update(self, entropy: float) -> dict[str, float]:
        """Adapt to the mean entropy in an update; return the coefficient that the update used.

        An entropy of 0 means that there were no tokens or no update; it changes nothing.
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
        """Return the coefficient for the actor and for checkpoints; empty if it is constant."""
        return {} if self.target is None else {"entropy_coeff": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint's coefficient, if it has one."""
        if self.target is not None:
            self.value = state.get("entropy_coeff", self.value)
