"""Policy losses by name, and what a policy loss says of itself.

    @POLICY_LOSSES.register("mine")
    @reads("clip_ratio_low")
    def compute_policy_loss_mine(old_log_prob, log_prob, advantages, response_mask, ...): ...

A loss has verl's signature and is called by keyword: old and new log-probs, advantages, mask,
`loss_agg_mode`, the actor's settings `config`, `rollout_is_weights` and the denominators of the
mini-batch. Keyword-only parameters with a default are set by `actor.policy_loss.args`. It returns
its share of the mini-batch's loss and metrics that add up in the same way.
Those of this folder are written as losses of tokens (`workers.losses.token_loss`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from torch import Tensor

from verl_like.config_key import KeyRules
from verl_like.registry import Registry
from verl_like.signatures import Call, check_call
from workers.losses.aggregate import Denominators

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
TokenChooser = Callable[..., Tensor]
"""(old log-probs, advantages, mask, generator, `config=`) of a mini-batch -> its chosen tokens."""
Positive = Annotated[float, KeyRules(above=0)]
NotNegative = Annotated[float, KeyRules(at_least=0)]
Share = Annotated[float, KeyRules(above=0, at_most=1)]
GIVEN = (
    *("old_log_prob", "log_prob", "advantages", "response_mask"),
    *("loss_agg_mode", "config", "rollout_is_weights"),
    *Denominators.__annotations__,
)
"""The keywords of every call of a loss."""
AnyPolicyLoss = TypeVar("AnyPolicyLoss", bound=PolicyLoss)


@dataclass(frozen=True)
class LossFacts:
    """What the checks of a configuration know of a policy loss; of a user's own only the first two.

    A loss with `choose_tokens` has a parameter `chosen_tokens`; called without it, it chooses among
    its own tokens.
    """

    keys_read: tuple[str, ...] | None = None
    """Keys of the actor's section that concern a policy loss alone; None: it may read every one."""
    choose_tokens: TokenChooser | None = None
    """How the tokens that it treats apart are chosen from a whole mini-batch."""
    has_ratio: bool = True
    """Whether it corrects updates after the first; if not, the samples must be the policy's own."""
    clips_weights: bool = False
    """Whether a token outside the clip range keeps its gradient: it may then reach down to 0."""
    one_ratio_a_sequence: bool = False
    """Whether all tokens of a sequence have one ratio."""
    clips_sequences: bool = False
    """Whether the clip range bounds that ratio, not those of tokens."""
    holds_weights: bool = False
    """Whether a weight in it has no gradient, so that finite differences are another slope."""
    longer_count_more: tuple[str, ...] = ()
    """Names of the loss under which a sequence is to count as many times as it has tokens."""


def facts_of(policy_loss: PolicyLoss) -> LossFacts:
    """What a loss says of itself."""
    facts: LossFacts = getattr(policy_loss, "facts", LossFacts())
    return facts


def says(**facts: Any) -> Callable[[AnyPolicyLoss], AnyPolicyLoss]:
    """Say some of `LossFacts` of a loss."""

    def mark(policy_loss: AnyPolicyLoss) -> AnyPolicyLoss:
        policy_loss.facts = replace(facts_of(policy_loss), **facts)  # type: ignore[attr-defined]
        return policy_loss

    return mark


def reads(*keys: str) -> Callable[[AnyPolicyLoss], AnyPolicyLoss]:
    """Say which keys of the actor's section that concern a policy loss alone this one reads."""
    return says(keys_read=keys)


def chooses_tokens(choose: TokenChooser) -> Callable[[AnyPolicyLoss], AnyPolicyLoss]:
    """Say that a loss treats some tokens apart, and how they are chosen from a whole mini-batch."""
    return says(choose_tokens=choose)


def _check(policy_loss: Any, subject: str) -> None:
    """Refuse what does not take what the actor gives a loss."""
    chosen = ("chosen_tokens",) if facts_of(policy_loss).choose_tokens else ()
    check_call(policy_loss, subject, Call(by_name=(*GIVEN, *chosen)))


POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", _check)


def get_policy_loss(name: str) -> PolicyLoss:
    """The policy loss of that name, or the user's own by its dotted path."""
    return POLICY_LOSSES.look_up(name)
