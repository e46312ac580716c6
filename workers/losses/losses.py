"""Losses of actor and critic, as pure functions of tensors and a mask; actor, critic and
`trainer.ppo.kl` call them.

Signatures are verl's, so a user's own loss moves over. Tensors are [rows, response tokens]. **Sums
over parts are exact.** A worker sees a micro-batch, a part of a global mini-batch: it passes the
mini-batch's denominators (`Denominators`), and then losses, gradients and metrics of all
micro-batches on all ranks *add up* to those of the whole mini-batch. Without them a call stands for
a whole mini-batch. Nothing outside the mask reaches a loss or a gradient, and an empty mask gives
zero for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from verl_like.errors import ConfigError, nearest
from verl_like.registry import Registry
from verl_like.tensor_ops import entropy_from_logits, masked_mean, masked_sum
from workers.config import ActorConfig

LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


class Denominators(TypedDict, total=False):
    """What `agg_loss` divides by; the counts are those of the global mini-batch."""

    batch_num_tokens: int | float | Tensor | None
    """Tokens inside the mask; read by token-mean, and by every metric."""
    global_batch_size: int | float | Tensor | None
    """Rows with at least one token inside the mask; read by the three seq-mean modes."""
    loss_scale_factor: int | float | None
    """Constant of seq-mean-token-sum-norm; by default the mask's width."""


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    batch_num_tokens: int | float | Tensor | None = None,
    global_batch_size: int | float | Tensor | None = None,
    loss_scale_factor: int | float | None = None,
) -> Tensor:
    """One number from token losses: this part's share of the global mini-batch's loss.

    token-mean is DAPO's (arXiv 2503.14476), seq-mean-token-mean GRPO's (arXiv 2402.03300),
    seq-mean-token-sum-norm Dr. GRPO's (arXiv 2503.20783).
    """
    inside = loss_mask.bool()
    if loss_agg_mode == "token-mean":
        return masked_sum(loss_mat, inside) / _at_least_one(batch_num_tokens, inside)
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ConfigError(
            f"unknown loss_agg_mode {loss_agg_mode!r}; there are {', '.join(LOSS_AGG_MODES)}."
            f"{nearest(loss_agg_mode, LOSS_AGG_MODES)}"
        )
    num_rows = _at_least_one(global_batch_size, inside.any(dim=-1))
    if loss_agg_mode == "seq-mean-token-mean":
        return masked_mean(loss_mat, inside, axis=-1).sum() / num_rows
    total = masked_sum(loss_mat, inside) / num_rows
    if loss_agg_mode == "seq-mean-token-sum":
        return total
    return total / (loss_scale_factor or loss_mask.shape[-1])


def _at_least_one(given: int | float | Tensor | None, counted: Tensor) -> Tensor:
    count = counted.sum() if given is None else torch.as_tensor(given, device=counted.device)
    return count.clamp(min=1)


# ------------------------------------------------------------------------------------------- policy

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def resolve_clip(
    clip_ratio: float | None, low: float | None = None, high: float | None = None
) -> tuple[float, float]:
    """(lower, upper) clip range: `clip_ratio` is both, unless one is set for itself."""
    lower, upper = clip_ratio if low is None else low, clip_ratio if high is None else high
    if lower is None or upper is None:
        raise ConfigError(
            "a policy loss needs clip_ratio, or both clip_ratio_low and clip_ratio_high."
        )
    return lower, upper


def _log_ratio(log_prob: Tensor, old_log_prob: Tensor, inside: Tensor) -> Tensor:
    """log(policy / old policy), clamped to what exp can take; zero, without gradient, outside the
    mask.
    """
    return torch.where(inside, log_prob - old_log_prob, 0).clamp(min=-20.0, max=20.0)


def _finish(
    losses: Tensor,
    log_ratio: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    rollout_is_weights: Tensor | None,
    fractions: dict[str, Tensor],
    denominators: Denominators,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh and aggregate; metrics are token means under the same denominators, so they add up as
    the loss does.
    """
    if rollout_is_weights is not None:
        losses = losses * torch.where(response_mask.bool(), rollout_is_weights.detach(), 0)
    per_token = {"actor/ppo_kl": -log_ratio, **fractions}
    metrics = {
        name: agg_loss(
            values.detach().to(losses.dtype), response_mask, "token-mean", **denominators
        )
        for name, values in per_token.items()
    }
    return agg_loss(losses, response_mask, loss_agg_mode, **denominators), metrics


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv 1707.06347), with two clip ranges and dual clip.

    The ranges are DAPO's (arXiv 2503.14476), dual clip is of arXiv 1912.09729. -A r, made worse by
    what clipping the ratio r to [1 - low, 1 + high] gives; for A < 0 never more than -A
    clip_ratio_c.
    """
    config = config or ActorConfig()
    if config.clip_ratio_c <= 1.0:
        raise ConfigError(
            f"clip_ratio_c is {config.clip_ratio_c}; it bounds a ratio that starts at 1: take more."
        )
    low, high = resolve_clip(config.clip_ratio, config.clip_ratio_low, config.clip_ratio_high)
    inside = response_mask.bool()
    log_ratio = _log_ratio(log_prob, old_log_prob, inside)
    ratio, advantages = log_ratio.exp(), torch.where(inside, advantages, 0)
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    pessimistic, bound = torch.maximum(free, clipped), -advantages * config.clip_ratio_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(pessimistic, bound), pessimistic)
    fractions = {
        "actor/pg_clipfrac": clipped > free,
        "actor/pg_clipfrac_lower": negative & (pessimistic > bound),
    }
    return _finish(
        losses, log_ratio, response_mask, loss_agg_mode, rollout_is_weights, fractions, denominators
    )


def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO in its token form (arXiv 2507.18071): one ratio a sequence, the exponential of the mean
    token log-ratio.

    Its value is the sequence's, its gradient the token's. The paper aggregates by
    seq-mean-token-mean and clips at 3e-4, 4e-4.
    """
    config = config or ActorConfig()
    inside = response_mask.bool()
    log_ratio = _log_ratio(log_prob, old_log_prob, inside)
    sequence = masked_mean(log_ratio.detach(), inside, axis=-1).unsqueeze(-1)
    unit = torch.where(
        inside, log_prob - log_prob.detach(), 0
    ).exp()  # 1, with the gradient of log_prob
    ratio = sequence.exp() * unit
    low, high = resolve_clip(config.clip_ratio, config.clip_ratio_low, config.clip_ratio_high)
    advantages = torch.where(inside, advantages, 0)
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    fractions = {
        "actor/pg_clipfrac": clipped > free,
        "actor/pg_clipfrac_lower": torch.zeros_like(inside),
    }
    losses = torch.maximum(free, clipped)
    return _finish(
        losses, log_ratio, response_mask, loss_agg_mode, rollout_is_weights, fractions, denominators
    )


def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO (arXiv 2506.13585): -A log p times the clipped ratio without its gradient; no token
    drops out.
    """
    config = config or ActorConfig()
    inside = response_mask.bool()
    log_ratio = _log_ratio(log_prob, old_log_prob, inside)
    low, high = resolve_clip(config.clip_ratio, config.clip_ratio_low, config.clip_ratio_high)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    losses = -torch.where(inside, advantages, 0) * weight * torch.where(inside, log_prob, 0)
    fractions = {
        "actor/pg_clipfrac": weight != ratio,
        "actor/pg_clipfrac_lower": torch.zeros_like(inside),
    }
    return _finish(
        losses, log_ratio, response_mask, loss_agg_mode, rollout_is_weights, fractions, denominators
    )


def compute_policy_loss_reinforce(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE (Williams, Machine Learning 8, 1992): -A log p, with
    no ratio and nothing to clip.
    """
    inside = response_mask.bool()
    losses = -torch.where(inside, advantages, 0) * torch.where(inside, log_prob, 0)
    log_ratio = _log_ratio(log_prob, old_log_prob, inside)
    return _finish(
        losses, log_ratio, response_mask, loss_agg_mode, rollout_is_weights, {}, denominators
    )


POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")
POLICY_LOSSES.register("vanilla")(compute_policy_loss_vanilla)
POLICY_LOSSES.register("gspo")(compute_policy_loss_gspo)
POLICY_LOSSES.register("cispo")(compute_policy_loss_cispo)
POLICY_LOSSES.register("reinforce")(compute_policy_loss_reinforce)


def get_policy_loss(name: str) -> PolicyLoss:
    """The policy loss of that name, or the user's own by its dotted path."""
    return POLICY_LOSSES.look_up(name)


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The vanilla loss in verl's older form: (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)."""
    low, high = resolve_clip(cliprange, cliprange_low, cliprange_high)
    config = ActorConfig(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=clip_ratio_c)
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    return (
        loss,
        metrics["actor/pg_clipfrac"],
        metrics["actor/ppo_kl"],
        metrics["actor/pg_clipfrac_lower"],
    )


def compute_rollout_importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str = "token",
    rollout_is_mode: str = "truncate",
    rollout_is_threshold: float = 2.0,
) -> Tensor:
    """`rollout_is_weights` of the policy losses: the trainer's over the rollout engine's
    probability, without gradient.

    With them the update is decoupled PPO (arXiv 2110.00641): the clip compares with the trainer's
    old policy, the weight with the one that sampled. Per token, or per sequence (the product over
    it). truncate caps them at the threshold c (Ionides, "Truncated importance sampling", JCGS 17,
    2008); mask keeps those within [1/c, c] and gives the others zero. Zero outside the mask.
    """
    if rollout_is not in ("token", "sequence") or rollout_is_mode not in ("truncate", "mask"):
        raise ConfigError(
            f"rollout_is={rollout_is!r} with rollout_is_mode={rollout_is_mode!r}: "
            "the first is token or sequence, the second truncate or mask."
        )
    if rollout_is_threshold < 1.0:
        raise ConfigError(
            f"rollout_is_threshold is {rollout_is_threshold}; equal policies weigh 1: take 1 or "
            "more."
        )
    inside = response_mask.bool()
    log_ratio = torch.where(inside, old_log_prob - rollout_log_prob, 0).detach()
    if rollout_is == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
    weights = log_ratio.clamp(min=-20.0, max=20.0).exp()
    if rollout_is_mode == "truncate":
        weights = weights.clamp(max=rollout_is_threshold)
    else:
        kept = (weights <= rollout_is_threshold) & (weights >= 1.0 / rollout_is_threshold)
        weights = torch.where(kept, weights, 0)
    return torch.where(inside, weights, 0)


# ---------------------------------------------------------------------------- value, entropy and KL


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, Tensor]:
    """(half the squared error, share of clipped tokens).

    The clip keeps a value within `cliprange_value` of the old one. The worse of the clipped and the
    unclipped error counts, as in PPO's reference code (arXiv 2005.12729, section 3).
    """
    inside = response_mask.bool()
    vpreds, returns, values = (
        torch.where(inside, column, 0) for column in (vpreds, returns, values)
    )
    clipped = torch.minimum(
        torch.maximum(vpreds, values - cliprange_value), values + cliprange_value
    )
    free_error, clipped_error = (vpreds - returns).square(), (clipped - returns).square()
    loss = 0.5 * agg_loss(
        torch.maximum(free_error, clipped_error), inside, loss_agg_mode, **denominators
    )
    held = (clipped_error > free_error).to(loss.dtype)
    return loss, agg_loss(held, inside, "token-mean", **denominators)


def compute_entropy_loss(
    logits: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    **denominators: Unpack[Denominators],
) -> Tensor:
    """Aggregated entropy of [rows, tokens, vocabulary] logits; the actor subtracts `entropy_coeff`
    times it.
    """
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, **denominators)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimates of KL(policy || reference) from the policy's tokens (Schulman,
    joschu.net/blog/kl-approx.html, 2020).

    kl or k1: the log-ratio. abs: its size. mse or k2: half its square. low_var_kl or k3: exp(-x) -
    1 + x, clamped to
    10. A trailing + keeps the value and takes k2's gradient, which is the KL's own, straight through.
    """
    if kl_penalty.endswith("+"):
        value, gradient = (
            _kl_estimate(logprob, ref_logprob, kl_penalty[:-1]),
            _kl_estimate(logprob, ref_logprob, "k2"),
        )
        return gradient - gradient.detach() + value.detach()
    return _kl_estimate(logprob, ref_logprob, kl_penalty)


def _kl_estimate(logprob: Tensor, ref_logprob: Tensor, name: str) -> Tensor:
    log_ratio = logprob - ref_logprob
    if name in ("kl", "k1"):
        return log_ratio
    if name == "abs":
        return log_ratio.abs()
    if name in ("mse", "k2"):
        return 0.5 * log_ratio.square()
    if name in ("low_var_kl", "k3"):
        inverse = (-log_ratio).clamp(min=-20.0, max=20.0)
        return (inverse.exp() - inverse - 1).clamp(min=-10.0, max=10.0)
    valid = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
    hint = nearest(name, valid)
    raise ConfigError(
        f"unknown KL estimator {name!r}; there are {', '.join(valid)}, also with a trailing "
        f"+.{hint}"
    )
