"""Turn a function of tokens into a policy loss.

    @POLICY_LOSSES.register("mine")
    @token_loss(keys_read=("clip_ratio",))
    def compute_policy_loss_mine(old_log_prob, log_prob, advantages, mask, config):
        ...
        return losses, {"actor/ppo_kl": ...}

The decorated function gets columns [rows, R] of some rows, where R is the number of response
tokens: log-probs under the old and the current policy, advantages that are zero outside the mask,
and the mask, a bool that is true for tokens in the loss. It also gets the actor's settings, and a
loss that chooses tokens gets `chosen`, a mask. `policy_loss.args` sets its keyword-only parameters.
It returns the loss of every token, [rows, R], and [rows, R] values whose means are metrics.

`token_loss` adds the weights of the rollout correction and the aggregation. The result has verl's
signature, and returns (loss, metrics) of scalars.

In formulas, A is the advantage, p the current and p_old the old probability of a token, r = p /
p_old the importance ratio, and sg(x) is x without gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch import Tensor

from verl_like.config_key import arguments_for, arguments_of
from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.aggregate import Denominators, LossAndMetrics, agg_policy_loss
from workers.losses.registry import PolicyLoss, declares

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
        hands_on = (losses_of,) if choose is None else (losses_of, choose)
        known = {name for function in hands_on for name in arguments_of(function)}

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
                of_choice = arguments_for(choose, arguments)
                chosen_tokens = choose(
                    old_log_prob, advantages, response_mask, config=settings, **of_choice
                )
            taken = arguments_for(losses_of, arguments)
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
