"""Clip-Cov: PPO without the gradient of a few tokens that would reduce the entropy strongly.

All tensors are [rows, R]; `workers.losses.token_loss` explains the shapes and the symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.aggregate import with_slope
from workers.losses.covariance import token_covariance
from workers.losses.importance_ratio import CLIP_RANGE, clip_range, log_ratio
from workers.losses.registry import POLICY_LOSSES, Share
from workers.losses.token_loss import token_loss


@torch.no_grad()
def _choose_tokens(
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
@token_loss(
    keys_read=CLIP_RANGE,
    choose_tokens=_choose_tokens,
)
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
    ratio = log_r.detach().exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(*clip_range(config))

    worse = zero_outside(torch.maximum(free, clipped), ~chosen)
    losses = with_slope(worse, zero_outside(free, ~(chosen | (clipped > free))), log_r)

    per_token = {"actor/ppo_kl": -log_r, "actor/pg_clipfrac": chosen}
    return losses, per_token
