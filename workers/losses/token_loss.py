"""Policy losses as functions of tokens: what every loss of this folder has in common, once.

    @POLICY_LOSSES.register("mine")
    @token_loss(keys_read=("clip_ratio",))
    def compute_policy_loss_mine(old_log_prob, log_prob, advantages, inside, config):
        ...
        return losses, {"actor/ppo_kl": ...}

The function under `token_loss` gets columns [rows, R] of some rows, advantages that are zero
outside the mask, and the settings; one that chooses tokens gets `chosen` too. It gives the losses
of the tokens, and what metrics are means of. What it becomes has verl's signature: weights of the
rollout's correction, aggregation, and blocks of large batches are added.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Unpack

from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.aggregate import Denominators, agg_policy_loss
from workers.losses.blocks import sum_over_blocks
from workers.losses.registry import PolicyLoss, facts_of, says

TokenLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def token_loss(
    default_agg_mode: str = "token-mean", **facts: Any
) -> Callable[[TokenLoss], PolicyLoss]:
    """Make a policy loss of a function of tokens; `facts` are `LossFacts`."""

    def decorate(losses_of: TokenLoss) -> PolicyLoss:
        def policy_loss(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = default_agg_mode,
            config: ActorConfig | None = None,
            rollout_is_weights: Tensor | None = None,
            chosen_tokens: Tensor | None = None,
            **denominators: Unpack[Denominators],
        ) -> tuple[Tensor, dict[str, Tensor]]:
            settings = config or ActorConfig()
            choose = facts_of(policy_loss).choose_tokens
            if choose is not None and chosen_tokens is None:
                chosen_tokens = choose(old_log_prob, advantages, response_mask, config=settings)

            def share(
                log_prob: Tensor, rows: slice, counts: Denominators
            ) -> tuple[Tensor, dict[str, Tensor]]:
                inside = response_mask[rows].bool()
                of_rows = zero_outside(advantages[rows], inside)
                chosen = () if chosen_tokens is None else (inside & chosen_tokens[rows],)
                losses, per_token = losses_of(
                    old_log_prob[rows], log_prob, of_rows, inside, settings, *chosen
                )
                weights = None if rollout_is_weights is None else rollout_is_weights[rows]
                return agg_policy_loss(losses, per_token, inside, loss_agg_mode, weights, **counts)

            return sum_over_blocks(share, log_prob, response_mask, denominators)

        update_wrapper(policy_loss, losses_of)
        del policy_loss.__wrapped__  # type: ignore[attr-defined]  # its signature is another one
        return says(**facts)(policy_loss)

    return decorate
