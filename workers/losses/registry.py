"""Policy losses by name, the declared properties of each loss, and losses of tokens.

    @POLICY_LOSSES.register("mine")
    @token_loss(keys_read=("clip_ratio",))
    def compute_policy_loss_mine(old_log_prob, log_prob, advantages, mask, config):
        ...
        return losses, {"actor/ppo_kl": ...}

A policy loss has verl's signature and is called by keyword: old and new log-probs, advantages,
mask, `loss_agg_mode`, the actor settings `config`, `rollout_is_weights` and the denominators of the
mini-batch. `actor.policy_loss.args` sets its keyword-only parameters that have a default. It
returns the rows' contribution to the loss of the mini-batch, and metrics that add up in the same
way.

The losses in this folder are functions of tokens, of which `token_loss` makes policy losses: it
adds the weights of the rollout correction and the aggregation. The decorated function gets columns
[rows, R] of some rows, where R is the number of response tokens: log-probs under the old and the
current policy, advantages that are zero outside the mask, and the mask, a bool that is true for
tokens in the loss. It also gets the actor's settings, and a loss that chooses tokens gets `chosen`,
a mask. It returns the loss of every token, [rows, R], and [rows, R] values whose means are metrics.

In formulas, A is the advantage, p the current and p_old the old probability of a token, r = p /
p_old the importance ratio, and sg(x) is x without gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from verl_like.config_key import KeyRules, select_arguments, settable_arguments
from verl_like.registry import CallSignature, Registry, check_call
from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.aggregate import Denominators, LossAndMetrics, agg_policy_loss

CLIP_RANGE = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
"""Keys of the actor section that set the clip range."""
LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this on both sides, so that their exponential stays finite."""


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return log(policy / old policy), clamped; outside the mask it is zero.

    Clamped values, and values outside the mask, have no gradient.
    """
    difference = zero_outside(log_prob - old_log_prob, mask)
    clamped = difference.detach().clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)
    # NaN is not clamped: its gradient is NaN, too, so the step is skipped
    return torch.where(difference.abs() >= LARGEST_LOG_RATIO, clamped, difference)


def clip_widths(config: ActorConfig) -> tuple[float, float]:
    """Return `clip_ratio_low` and `clip_ratio_high`; the default of both is `clip_ratio`."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return config.clip_ratio if low is None else low, config.clip_ratio if high is None else high


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """Return the (smallest, largest) allowed ratio."""
    low, high = clip_widths(config)
    return 1.0 - low, 1.0 + high


PolicyLoss = Callable[..., LossAndMetrics]
TokenChooser = Callable[..., Tensor]
"""(old log-probs, advantages, mask, generator, `config=`) -> chosen tokens of the mini-batch."""
Positive = Annotated[float, KeyRules(above=0)]
NotNegative = Annotated[float, KeyRules(at_least=0)]
Share = Annotated[float, KeyRules(above=0, at_most=1)]
LOSS_INPUTS = (
    *("old_log_prob", "log_prob", "advantages", "response_mask"),
    *("loss_agg_mode", "config", "rollout_is_weights"),
    *Denominators.__annotations__,
)
"""The keyword arguments that every loss is called with."""
AnyPolicyLoss = TypeVar("AnyPolicyLoss", bound=PolicyLoss)


@dataclass(frozen=True)
class LossTraits:
    """Properties of a policy loss, which configuration checks use.

    `verl_like.extend` has decorators for the first two fields: `declare_loss_keys` and
    `declare_chosen_tokens`. A loss with `choose_tokens` must have a parameter
    `chosen_tokens`. If a caller leaves it out, the loss has to choose from the tokens of the call,
    as losses made by `token_loss` do.
    """

    keys_read: tuple[str, ...] | None = None
    """Loss keys of the actor that this loss reads; None means that it may read any of them."""
    choose_tokens: TokenChooser | None = None
    """Function that chooses the specially treated tokens from a whole mini-batch."""
    has_ratio: bool = True
    """False if the loss has no importance ratio; its samples must then be on-policy."""
    clips_weights: bool = False
    """True if tokens outside the clip range keep their gradient; the lower bound may then be 0."""
    one_ratio_per_sequence: bool = False
    """True if all tokens of a sequence have the same ratio."""
    clips_sequences: bool = False
    """True if the clip range bounds the sequence ratio, not token ratios."""
    holds_weights: bool = False
    """True if a factor in the loss has no gradient, so finite differences do not apply."""
    longer_count_more: tuple[str, ...] = ()
    """Registered names of this loss under which longer sequences get more weight."""


def traits_of(policy_loss: PolicyLoss) -> LossTraits:
    """Return the declared properties of a loss."""
    traits: LossTraits = getattr(policy_loss, "traits", LossTraits())
    return traits


def declares(**traits: Any) -> Callable[[AnyPolicyLoss], AnyPolicyLoss]:
    """Declare some of `LossTraits` for a loss."""

    def mark(policy_loss: AnyPolicyLoss) -> AnyPolicyLoss:
        policy_loss.traits = replace(traits_of(policy_loss), **traits)  # type: ignore[attr-defined]
        return policy_loss

    return mark


def declare_loss_keys(*keys: str) -> Callable[[AnyPolicyLoss], AnyPolicyLoss]:
    """Declare the keys of the actor section that this policy loss reads, such as `clip_ratio`.

    If the user sets another key of policy losses, the run then prints a notice that it has no
    effect. Without the decorator, a loss may read any of them.

    Example:

        @declare_loss_keys("clip_ratio_low", "clip_ratio_high")
        def compute_my_loss(old_log_prob, log_prob, advantages, response_mask, **settings): ...
    """
    return declares(keys_read=keys)


def declare_chosen_tokens(choose: TokenChooser) -> Callable[[AnyPolicyLoss], AnyPolicyLoss]:
    """Declare the function that chooses the specially treated tokens from a whole mini-batch.

    The driver calls `choose(old_log_prob, advantages, response_mask, generator, config=actor)`, in
    which the tensors are [rows, R]. It returns a bool mask [rows, R], which the loss gets as
    `chosen_tokens`.

    Example:

        def choose_certain(old_log_prob, advantages, response_mask, generator, config):
            return (old_log_prob > -0.1) & response_mask.bool()

        @declare_chosen_tokens(choose_certain)
        def compute_my_loss(log_prob, chosen_tokens, **inputs): ...
    """
    return declares(choose_tokens=choose)


def _check(policy_loss: Any, subject: str) -> None:
    """Reject a loss that does not accept the arguments that the actor passes."""
    chosen = ("chosen_tokens",) if traits_of(policy_loss).choose_tokens else ()
    check_call(policy_loss, subject, CallSignature(by_name=(*LOSS_INPUTS, *chosen)))


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss",
    _check,
    "(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, "
    "rollout_is_weights, **denominators) -> (loss, metrics)",
)
"""Names for `actor.policy_loss.loss_mode`.

The loss is a scalar, and metrics are scalars by name; both add up over micro-batches and ranks.

    @POLICY_LOSSES.register("mine")
    def compute_my_loss(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
        rollout_is_weights, **denominators,
    ):
        losses = -torch.exp(log_prob - old_log_prob) * advantages           # [rows, R]
        return agg_loss(losses, response_mask, loss_agg_mode, **denominators), {}
"""


def get_policy_loss(name: str) -> PolicyLoss:
    """Return the policy loss registered under this name, or your function by its dotted path."""
    return POLICY_LOSSES.look_up(name)


TokenLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def token_loss(
    default_agg_mode: str = "token-mean", **traits: Any
) -> Callable[[TokenLoss], PolicyLoss]:
    """Return a decorator that makes a policy loss of a function that returns token losses.

        @POLICY_LOSSES.register("mine")
        @token_loss(keys_read=(), has_ratio=False)
        def compute_policy_loss_mine(old_log_prob, log_prob, advantages, mask, config):
            losses = -advantages * log_prob              # [rows, R], as every tensor here
            return losses, {"actor/ppo_kl": old_log_prob - log_prob}

    Args:
        default_agg_mode: the `loss_agg_mode` of calls without one, such as those of tests; the
            actor passes the mode of its configuration.
        traits: fields of `LossTraits`, such as `keys_read`, the actor's keys that the loss reads.
    """
    choose = traits.get("choose_tokens")

    def decorate(losses_of: TokenLoss) -> PolicyLoss:
        """Return a policy loss that aggregates the token losses of `losses_of`."""
        hands_on = (losses_of,) if choose is None else (losses_of, choose)
        known = {name for function in hands_on for name in settable_arguments(function)}

        def policy_loss(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = default_agg_mode,
            config: ActorConfig | None = None,
            rollout_is_weights: Tensor | None = None,
            chosen_tokens: Tensor | None = None,
            **options: Any,
        ) -> LossAndMetrics:
            settings = config or ActorConfig()
            arguments = {name: options.pop(name) for name in [*options] if name in known}
            arguments = settings.policy_loss.args | arguments
            if choose is not None and chosen_tokens is None:
                of_choice = select_arguments(choose, arguments)
                chosen_tokens = choose(
                    old_log_prob, advantages, response_mask, config=settings, **of_choice
                )
            taken = select_arguments(losses_of, arguments)
            denominators: Denominators = options  # type: ignore[assignment]

            mask = response_mask.bool()
            chosen = () if chosen_tokens is None else (mask & chosen_tokens,)
            losses, per_token = losses_of(
                old_log_prob,
                log_prob,
                zero_outside(advantages, mask),
                mask,
                settings,
                *chosen,
                **taken,
            )
            return agg_policy_loss(
                losses, per_token, mask, loss_agg_mode, rollout_is_weights, **denominators
            )

        policy_loss.takes_arguments_of = hands_on  # type: ignore[attr-defined]
        update_wrapper(policy_loss, losses_of)
        del policy_loss.__wrapped__  # type: ignore[attr-defined]  # another signature
        return declares(**traits)(policy_loss)

    return decorate
