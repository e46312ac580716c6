"""Clip-Cov and KL-Cov treat tokens differently that would reduce the entropy most.

The covariance of log-prob and advantage at a token tells how an update at the token changes the
entropy.

All tensors are [rows, R]; `workers.losses.registry` explains the shapes and the symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import masked_mean, zero_outside
from workers.config import ActorConfig
from workers.losses.registry import (
    CLIP_RANGE,
    POLICY_LOSSES,
    NotNegative,
    Share,
    clip_range,
    log_ratio,
    token_loss,
)


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
