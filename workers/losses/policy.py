"""Policy losses, each with its formula and source: of single tokens, of sequences, by covariance.

All tensors are [rows, R]; `workers.losses.registry` explains the shapes and the symbols. In a loss
of single tokens (PPO's clip, CISPO, SAPO, DPPO, …), each token's ratio counts for itself. GSPO has
one importance ratio per sequence, and GMPO clips each token's ratio. Clip-Cov and KL-Cov treat
tokens differently that would reduce the entropy most: the covariance of log-prob and advantage at a
token tells how an update at the token changes the entropy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import masked_mean, zero_outside
from workers.config import ActorConfig
from workers.losses.registry import (
    CLIP_RANGE,
    LARGEST_LOG_RATIO,
    POLICY_LOSSES,
    NotNegative,
    Positive,
    Share,
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
    faster for tokens whose probability is reduced.

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


@POLICY_LOSSES.register("geo_mean", "gmpo")
@token_loss("seq-mean-token-mean", keys_read=CLIP_RANGE, one_ratio_per_sequence=True)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The geometric mean s of the sequence's ratios, each clipped on one side: `-A * s`.

    A is the mean of the sequence's advantages. log r is at most `clip_ratio_high` where the
    advantage is positive, and at least `-clip_ratio_low` where it is negative; it counts as 0 where
    the advantage is 0. Every token gets the loss of its sequence.

    Watch: If `actor/pg_clipfrac` or `actor/pg_clipfrac_lower` (fractions of tokens clipped at the
    upper or lower bound) is above a few percent, lower the learning rate, or use fewer mini-batches
    per step.

    Source: GMPO, arXiv 2507.20673
    """
    low, high = clip_widths(config)
    log_r = log_ratio(log_prob, old_log_prob, mask)

    rises, sign = advantages > 0, advantages.sign()
    limit = torch.where(rises, log_r.new_tensor(high), log_r.new_tensor(low))
    limited = sign * torch.minimum(sign * log_r, limit)
    lengths = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = (limited.sum(dim=-1, keepdim=True) / lengths).exp()
    losses = (-advantages.sum(dim=-1, keepdim=True) / lengths * ratio).expand_as(mask)

    is_clipped = sign * log_r > limit
    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": is_clipped & rises,
        "actor/pg_clipfrac_lower": is_clipped & ~rises,
    }
    return losses, per_token


@POLICY_LOSSES.register("gspo", "luspo")
@token_loss(
    "seq-mean-token-mean",
    keys_read=CLIP_RANGE,
    one_ratio_per_sequence=True,
    clips_sequences=True,
    holds_weights=True,
    longer_count_more=("luspo",),
)
def compute_policy_loss_gspo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss with the ratio of the sequence: the geometric mean of its token ratios.

    This is the paper's token-level form: the value is that of the sequence ratio, and each token
    contributes its own gradient. LUSPO (`luspo`) is this loss with
    `loss_agg_mode=seq-mean-token-sum`, which weights each sequence by its number of tokens.

    Watch: `actor/pg_clipfrac` is usually 0.1 or more. If it is 0, the clip range is too wide for
    sequence ratios: set `clip_ratio_low` and `clip_ratio_high`.

    Source: GSPO, arXiv 2507.18071, section 4.3; LUSPO, arXiv 2602.05261
    """
    log_r = log_ratio(log_prob.detach(), old_log_prob, mask)
    # only the mean is clamped, so a token that moved far counts fully
    mean = masked_mean((log_prob - old_log_prob).detach(), mask, axis=-1).unsqueeze(-1)
    of_sequence = mean.clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO).exp()
    ratio = of_sequence * zero_outside(log_prob - log_prob.detach(), mask).exp()

    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(*clip_range(config))
    losses = torch.maximum(free, clipped)

    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": clipped > free,
        "actor/pg_clipfrac_lower": torch.zeros_like(mask),
    }
    return losses, per_token


@torch.no_grad()
def _choose_some_of_high_covariance(
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    generator: torch.Generator | None = None,
    config: ActorConfig | None = None,
    *,
    clip_cov_ratio: Share = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Tensor:
    """Choose the tokens whose gradient is zeroed: a random few of those with high covariance."""
    mask = response_mask.bool()
    covariance = token_covariance(advantages, old_log_prob, mask)
    candidates = (covariance > clip_cov_lb) & (covariance < clip_cov_ub)

    count = max(int(clip_cov_ratio * torch.count_nonzero(mask)), 1)
    places = candidates.flatten().nonzero().squeeze(-1)
    order = torch.randperm(len(places), generator=generator).to(places.device)
    chosen = torch.zeros_like(candidates.flatten())
    chosen[places[order[:count]]] = True
    return chosen.view_as(candidates)


@POLICY_LOSSES.register("clip_cov")
@token_loss(keys_read=CLIP_RANGE, choose_tokens=_choose_some_of_high_covariance)
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
    chosen: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss, set to 0 for a few tokens whose A and log p have a high covariance.

    They are sampled from the tokens whose covariance under the old policy is between `clip_cov_lb`
    and `clip_cov_ub`: a fraction `clip_cov_ratio` of all tokens in the mini-batch, at least one, or
    fewer if the range has fewer.

    Watch: If `actor/entropy` falls as with `vanilla` while `actor/pg_clipfrac` is 0, widen the
    range, or use `kl_cov`.

    Source: arXiv 2505.22617
    """
    log_r = log_ratio(log_prob, old_log_prob, mask)
    ratio = log_r.exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(*clip_range(config))
    losses = zero_outside(torch.maximum(free, clipped), ~chosen)

    per_token = {"actor/ppo_kl": -log_r, "actor/pg_clipfrac": chosen}
    return losses, per_token


@torch.no_grad()
def _choose_highest_covariance(
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    generator: torch.Generator | None = None,
    config: ActorConfig | None = None,
    *,
    kl_cov_ratio: Share = 2e-4,
) -> Tensor:
    """Choose the tokens with a KL penalty: those of the mini-batch with the highest covariance."""
    mask = response_mask.bool()
    covariance = token_covariance(advantages, old_log_prob, mask)

    flat = covariance.flatten()
    count = max(int(kl_cov_ratio * torch.count_nonzero(mask)), 1)
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[flat.topk(min(count, len(flat))).indices] = True
    return chosen.view_as(mask) & mask


@POLICY_LOSSES.register("kl_cov")
@token_loss(keys_read=(), choose_tokens=_choose_highest_covariance)
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
    chosen: Tensor,
    *,
    ppo_kl_coef: NotNegative = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A KL penalty on the tokens with the highest covariance of A and log p: `-A * r + KL`.

    The KL is `ppo_kl_coef * |log r|`. It applies to a fraction `kl_cov_ratio` of the tokens in the
    mini-batch, at least one. The covariance is computed under the old policy.

    Watch: If `actor/ppo_kl`, here the mean of |log r|, grows within a step, use fewer mini-batches,
    because nothing is clipped. `actor/entropy` should stop falling.

    Source: arXiv 2505.22617
    """
    log_r = log_ratio(log_prob, old_log_prob, mask)
    distance = log_r.abs()
    kl = ppo_kl_coef * zero_outside(distance, chosen)
    losses = kl - advantages * log_r.exp()

    return losses, {"actor/ppo_kl": distance, "actor/kl_cov_frac": chosen}


@torch.no_grad()
def token_covariance(advantages: Tensor, log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return (A - mean A) (log p - mean log p), [rows, R], with means over the tokens of the call.

    `mask` is a bool; tokens outside it get -inf. The mean over the other tokens is the covariance,
    which determines how fast the entropy falls (arXiv 2505.22617).
    """
    product = (advantages - masked_mean(advantages, mask)) * (
        log_prob - masked_mean(log_prob, mask)
    )
    return product.masked_fill(~mask, -torch.inf)
