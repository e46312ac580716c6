"""Estimates of KL(policy || reference) from log-probs of tokens that the policy sampled.

The KL in the actor's loss and the KL in the reward both use them. They are elementwise: a log-ratio
of any shape, such as [rows, R], gives an estimate of that shape. x = log policy - log reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from verl_like.errors import ConfigError, nearest


def k1(log_ratio: Tensor) -> Tensor:
    """The log-ratio x = log policy - log reference.

    Source: Schulman, joschu.net/blog/kl-approx.html, 2020
    """
    return log_ratio


def absolute(log_ratio: Tensor) -> Tensor:
    """The absolute value of the log-ratio, |x|.

    Source: verl's `abs`
    """
    return log_ratio.abs()


def k2(log_ratio: Tensor) -> Tensor:
    """Half the square of the log-ratio; its gradient estimates the KL's gradient without bias.

    Source: Schulman, joschu.net/blog/kl-approx.html, 2020
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-x) - 1 + x, which is never negative and has a low variance; clamped to 10.

    Source: Schulman, joschu.net/blog/kl-approx.html, 2020; as a loss: GRPO, arXiv 2402.03300
    """
    inverse = (-log_ratio).clamp(min=-20.0, max=20.0)
    return (inverse.exp() - inverse - 1).clamp(min=-10.0, max=10.0)


def k3_swapped(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x: k3 with policy and reference swapped; clamped to 10.

    Its mean over samples of the policy is the chi-squared divergence minus the KL, not the KL. Use
    it only to match ColossalChat.

    Source: ColossalChat's `compute_approx_kl`, which does not clamp
    """
    return k3(-log_ratio)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
    "k3_swapped": k3_swapped,
}


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Return the estimate `kl_penalty`, a key of `KL_ESTIMATORS`, for every token: [rows, R].

    With a trailing +, such as "k3+", its gradient is that of k2 (straight-through).
    """
    name = kl_penalty.removesuffix("+")
    if name not in KL_ESTIMATORS:
        raise ConfigError(
            f"unknown KL estimator {kl_penalty!r}. Known: {', '.join(KL_ESTIMATORS)}, also with a "
            f"trailing +.{nearest(name, KL_ESTIMATORS)}"
        )
    log_ratio = logprob - ref_logprob
    estimate = KL_ESTIMATORS[name](log_ratio)
    if name == kl_penalty:
        return estimate

    gradient = k2(log_ratio)
    return gradient - gradient.detach() + estimate.detach()
