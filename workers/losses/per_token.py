"""Policy losses of single tokens: each token's ratio counts for itself.

All tensors are [rows, R]; `workers.losses.registry` explains the shapes and the symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.registry import (
    CLIP_RANGE,
    POLICY_LOSSES,
    Positive,
    clip_range,
    clip_widths,
    log_ratio,
    token_loss,
)

_SMALLEST = 1e-8
"""Lower bound for the probability of "another token", so that the KL is always finite."""


@POLICY_LOSSES.register("vanilla")
@token_loss(keys_read=(*CLIP_RANGE, "clip_ratio_c"))
def compute_policy_loss_vanilla(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss: `max(-A * r, -A * clip(r))`.

    `clip(r)` is within [1 - clip_ratio_low, 1 + clip_ratio_high]. For A < 0, the loss is at most
    `-A * clip_ratio_c` (dual clip).

    Watch: If `actor/pg_clipfrac` is above 0.2, or `actor/ppo_kl` grows over the run, lower the
    learning rate, or use fewer mini-batches per step. If `actor/entropy` falls to 0, raise
    `clip_ratio_high`.

    Source: PPO, arXiv 1707.06347; two ranges: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729
    """
    log_r = log_ratio(log_prob, old_log_prob, mask)
    ratio = log_r.exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(*clip_range(config))
    worse = torch.maximum(free, clipped)

    # has no effect if A >= 0, because the loss is then not positive
    bound = advantages.abs() * config.clip_ratio_c
    losses = torch.minimum(worse, bound)

    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": clipped > free,
        "actor/pg_clipfrac_lower": worse > bound,
    }
    return losses, per_token


@POLICY_LOSSES.register("reinforce", "gpg")
@token_loss(keys_read=(), has_ratio=False)
def compute_policy_loss_reinforce(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient, without ratio or clipping: `-A * log p`.

    GPG has the same loss. With `rollout_correction.rollout_is`, the gradient of each token is
    weighted by the ratio of the trainer's to the rollout's probability, of the token or of its
    sequence. This ratio is bounded and has no gradient.

    Watch: If `actor/ppo_kl` is not about 0, later mini-batches are off-policy: set
    `actor.ppo_mini_batch_size` to the whole batch and `actor.ppo_epochs` to 1, or use `vanilla`.

    Source: Williams, Machine Learning 8, 1992; GPG, arXiv 2504.02546
    """
    losses = -advantages * zero_outside(log_prob, mask)
    per_token = {"actor/ppo_kl": -log_ratio(log_prob, old_log_prob, mask)}
    return losses, per_token


@POLICY_LOSSES.register("cispo")
@token_loss(keys_read=CLIP_RANGE, clips_weights=True, holds_weights=True)
def compute_policy_loss_cispo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient, weighted by the clipped ratio: `-A * sg(clip(r)) * log p`.

    Unlike with PPO's clipping, every token keeps a gradient.

    Watch: If `actor/pg_clipfrac`, the fraction of clipped weights, is above a few percent, use
    fewer mini-batches per step.

    Source: MiniMax-M1 (CISPO), arXiv 2506.13585
    """
    log_r = log_ratio(log_prob, old_log_prob, mask)
    ratio = log_r.detach().exp()
    weight = ratio.clamp(*clip_range(config))
    losses = -advantages * weight * zero_outside(log_prob, mask)

    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": weight != ratio,
        "actor/pg_clipfrac_lower": torch.zeros_like(mask),
    }
    return losses, per_token


@POLICY_LOSSES.register("sapo")
@token_loss("seq-mean-token-mean", keys_read=())
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
    *,
    tau_pos: Positive = 1.0,
    tau_neg: Positive = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A smooth gate instead of clipping: `-A * (4 / tau) * sigmoid(tau * (r - 1))`.

    At r = 1, its gradient equals the policy gradient; it fades as r moves away from 1. tau is
    `tau_pos` where A > 0. Elsewhere it is `tau_neg`, by default larger, so that the gradient fades
    faster for tokens whose probability is reduced. The paper uses `seq-mean-token-mean`.

    Watch: If `actor/ppo_kl` grows while `actor/grad_norm` falls, lower the learning rate, or use
    fewer mini-batches per step.

    Source: SAPO, arXiv 2511.20347
    """
    log_r = log_ratio(log_prob, old_log_prob, mask)
    ratio = log_r.exp()
    tau = torch.where(advantages > 0, log_r.new_tensor(tau_pos), log_r.new_tensor(tau_neg))
    losses = -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1))
    return losses, {"actor/ppo_kl": -log_r}


@POLICY_LOSSES.register("dro")
@token_loss(keys_read=())
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
    *,
    dro_beta: Positive = 0.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient with a quadratic penalty: `-A * log p + dro_beta / 2 * (log r)^2`.

    Instead of a ratio or clipping, the penalty keeps each log-prob near that of the old policy.

    Watch: If `actor/ppo_kl` grows while `actor/dro_penalty` stays far below `actor/pg_loss`, raise
    `dro_beta`, lower the learning rate, or use fewer mini-batches.

    Source: DRO, arXiv 2405.19107, applied per token
    """
    log_r = log_ratio(log_prob, old_log_prob, mask)
    penalty = 0.5 * dro_beta * log_r.square()
    losses = penalty - advantages * zero_outside(log_prob, mask)
    return losses, {"actor/ppo_kl": -log_r, "actor/dro_penalty": penalty}


@POLICY_LOSSES.register("dppo_kl")
@token_loss(keys_read=(*CLIP_RANGE, "clip_ratio_c"), holds_weights=True)
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient for tokens with a small KL: `-A * sg(min(r, clip_ratio_c)) * log p`.

    The KL is KL(old policy || current policy) over two outcomes: this token or another one. A token
    with A > 0 is left out if p rose and the KL is above `clip_ratio_high`. Any other token is left
    out if p fell and the KL is above `clip_ratio_low`.

    Watch: If `actor/pg_clipfrac`, the fraction of tokens left out, is 0, lower `clip_ratio_low` and
    `clip_ratio_high`. If `actor/pg_clipfrac_lower`, the fraction of tokens whose ratio is
    truncated at `clip_ratio_c`, is more than a few percent, raise `clip_ratio_c`.

    Source: DPPO, arXiv 2602.04879
    """
    moved = _signed_binary_kl(old_log_prob, log_prob.detach())
    return _losses_in_trust_region(moved, old_log_prob, log_prob, advantages, mask, config)


@POLICY_LOSSES.register("dppo_tv")
@token_loss(keys_read=(*CLIP_RANGE, "clip_ratio_c"), holds_weights=True)
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient for tokens whose p moved little: `-A * sg(min(r, clip_ratio_c)) * log p`.

    A token with A > 0 is left out if p is more than `clip_ratio_high` above p_old. Any other token
    is left out if p is more than `clip_ratio_low` below p_old. Here these keys bound the change of
    the probability, not the ratio. The paper sets `clip_ratio_c` to 20.

    Watch: If `actor/pg_clipfrac`, the fraction of tokens left out, is 0, lower `clip_ratio_low` and
    `clip_ratio_high`. If `actor/pg_clipfrac_lower`, the fraction of tokens whose ratio is
    truncated at `clip_ratio_c`, is more than a few percent, raise `clip_ratio_c`.

    Source: DPPO, arXiv 2602.04879
    """
    moved = log_prob.detach().exp() - old_log_prob.exp()
    return _losses_in_trust_region(moved, old_log_prob, log_prob, advantages, mask, config)


def _signed_binary_kl(old_log_prob: Tensor, log_prob: Tensor) -> Tensor:
    """Return the divergence, with a negative sign where the log-prob fell."""
    old, new = old_log_prob.exp(), log_prob.exp()
    old_others, new_others = (1 - old).clamp(min=_SMALLEST), (1 - new).clamp(min=_SMALLEST)
    rose = log_prob - old_log_prob
    kl = (1 - old) * (old_others / new_others).log() - old * rose
    return kl.clamp(min=0).copysign(rose)


def _losses_in_trust_region(
    moved: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the token losses, and per-token values whose means are metrics.

    The loss is -A log p times the ratio; the ratio is at most `clip_ratio_c` and has no gradient.
    `moved` is negative where the probability fell. A token with a positive advantage drops out if
    its `moved` exceeds `clip_ratio_high`; another token, if its `moved` is below `-clip_ratio_low`.
    """
    low, high = clip_widths(config)
    log_r = log_ratio(log_prob.detach(), old_log_prob, mask)
    ratio = log_r.exp()

    rises = advantages > 0
    dropped = ((rises & (moved > high)) | (~rises & (moved < -low))) & mask
    weight = zero_outside(ratio.clamp(max=config.clip_ratio_c), ~dropped)
    losses = -advantages * weight * zero_outside(log_prob, mask)

    return losses, {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": dropped,
        "actor/pg_clipfrac_lower": (ratio > config.clip_ratio_c) & ~dropped,
    }
