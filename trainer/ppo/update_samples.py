"""The samples that an update trains on: what is left of a batch, corrected for the rollout.

Samples may leave the losses, not the batch (cut by the length limit, without a score), tokens may
be weighed or rejected (`correct_rollout`), samples drawn anew by their scores (PF-PPO), and tokens
singled out for a loss. Rows of PTX are trained beside them.

PF-PPO: rewards are least reliable in the middle, so samples of high and low scores teach more
(arXiv 2409.06957). `clip_cov` and `kl_cov` compare a mini-batch's tokens with each other. The
driver has all of them, so it draws and chooses, and the workers read the column `chosen_tokens`:
neither the number of ranks nor the cut into micro-batches changes what is chosen.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.encoded_rows import LMRow
from trainer.data.lm_rows import lm_batch, read_lm_rows
from trainer.data.loader import RowLoader
from trainer.ppo.config import PolicyFiltrationConfig, PPOConfig
from trainer.ppo.correct_rollout import correct_rollout
from trainer.sample_ledger import TRAINED
from workers.columns import drawn_from, read_columns, require, write_columns
from workers.losses.registry import facts_of, get_policy_loss
from workers.rewards.weighted import SKIPPED

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
    return choose_tokens(
        batch,
        policy.actor.policy_loss.loss_mode,
        policy.actor.ppo_mini_batch_size * policy.rollout.n,
        config.trainer.seed,
        step,
        old_log_probs=drawn_from(batch.columns) if bypasses else "old_log_probs",
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
    choose = facts_of(get_policy_loss(loss_mode)).choose_tokens
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


CUT_BY_LENGTH = "length"
"""The `finish_reason` of a sample that reached the limit before an end of sequence."""
logger = logging.getLogger(__name__)


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
    """The same of samples that a failed reward skips, by its `on_failure`."""
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


FILTERED = "algorithm.filter_groups"
EMPTY = "no token"


def count_by_reason(batch: DataProto, learned: DataProto, config: PPOConfig) -> dict[str, int]:
    """Of a step's samples: how many are in the losses of what is `learned`, and why others are not.

    A sample that PF-PPO has drawn several times is one.
    """
    given, kept = _with_tokens(batch), _with_tokens(learned)
    in_losses = Counter(name for name, has_tokens in kept if has_tokens)
    draws_anew = config.algorithm.use_pf_ppo
    became = Counter({TRAINED: len(in_losses) if draws_anew else in_losses.total()})
    handed_over = {name for name, _ in kept}

    unknown = [None] * len(batch)
    columns = batch.non_tensor_batch
    reasons, skipped = (columns.get(name, unknown) for name in ("finish_reason", SKIPPED))
    for row, (name, has_tokens) in enumerate(given):
        if name in in_losses:
            continue
        if not has_tokens:
            became[EMPTY] += 1
        elif config.algorithm.mask_truncated and reasons[row] == CUT_BY_LENGTH:
            became["algorithm.mask_truncated"] += 1
        elif skipped[row] == 1.0:
            became["on_failure=skip"] += 1
        elif draws_anew and name not in handed_over:
            became["algorithm.use_pf_ppo"] += 1
        else:
            became["algorithm.rollout_correction"] += 1
    return dict(became)


def _with_tokens(samples: DataProto) -> list[tuple[tuple[str, int], bool]]:
    """Every row's name, and whether a token of it is in the losses."""
    read = read_columns(samples, "sample_index", "response_mask")
    names = zip(samples.non_tensor_batch["uid"], read["sample_index"].tolist(), strict=True)
    return list(zip(names, read["response_mask"].any(dim=-1).tolist(), strict=True))


def make_ptx_loader(config: PPOConfig, tokenizer: Any) -> RowLoader[LMRow] | None:
    """The loader of `ptx.train_files`, if there are any."""
    if not config.ptx.train_files:
        return None
    files, longest, on_bad_row = config.ptx.train_files, longest_row(config), config.data.on_bad_row
    rows = read_lm_rows("ptx.train_files", files, tokenizer, longest, on_bad_row=on_bad_row)
    make_batch = partial(lm_batch, pad_token_id=tokenizer.pad_token_id)
    return RowLoader(rows, config.trainer.seed, make_batch)


def longest_row(config: PPOConfig) -> int:
    """Tokens of the longest row: by default those of a prompt with its response."""
    sample = config.data.max_prompt_length + config.data.max_response_length
    return config.ptx.max_length or sample


def rows_per_update(config: PPOConfig, num_prompts: int) -> int:
    """Rows of all optimizer steps of an `update_actor` on the samples of so many prompts."""
    actor = config.actor_rollout_ref.actor
    num_steps = num_prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
    return num_steps * (config.ptx.batch_size or actor.ppo_mini_batch_size)
