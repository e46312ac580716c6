"""Policy losses by name, and what a policy loss says of itself.

    @POLICY_LOSSES.register("mine")
    @reads("clip_ratio_low")
    def compute_policy_loss_mine(old_log_prob, log_prob, advantages, response_mask, ...): ...

A loss has verl's signature and is called by keyword: old and new log-probs, advantages, mask,
`loss_agg_mode`, the actor's settings `config`, `rollout_is_weights` and the denominators of the
mini-batch. It returns its share of the mini-batch's loss and metrics that add up in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from verl_like.registry import Registry
from verl_like.signatures import Call, check_call
from workers.losses.aggregate import Denominators

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
TokenChooser = Callable[..., Tensor]
"""(old log-probs, advantages, mask, generator) of a mini-batch -> where its chosen tokens are."""
GIVEN = (
    *("old_log_prob", "log_prob", "advantages", "response_mask"),
    *("loss_agg_mode", "config", "rollout_is_weights"),
    *Denominators.__annotations__,
)
"""The keywords of every call of a loss."""
AnyPolicyLoss = TypeVar("AnyPolicyLoss", bound=PolicyLoss)


def _check(policy_loss: Any, subject: str) -> None:
    """Refuse what does not take what the actor gives a loss."""
    chosen = ("chosen_tokens",) if token_chooser(policy_loss) is not None else ()
    check_call(policy_loss, subject, Call(by_name=(*GIVEN, *chosen)))


POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", _check)


def reads(*keys: str) -> Callable[[AnyPolicyLoss], AnyPolicyLoss]:
    """Say which keys of the actor's section that concern a policy loss alone this one reads."""

    def mark(policy_loss: AnyPolicyLoss) -> AnyPolicyLoss:
        policy_loss.keys_read = keys  # type: ignore[attr-defined]
        return policy_loss

    return mark


def keys_read(policy_loss: PolicyLoss) -> tuple[str, ...] | None:
    """What `reads` said; None where nobody said anything, and every key may be read."""
    keys: tuple[str, ...] | None = getattr(policy_loss, "keys_read", None)
    return keys


def chooses_tokens(choose: TokenChooser) -> Callable[[AnyPolicyLoss], AnyPolicyLoss]:
    """Say that a loss treats some tokens apart, and how they are chosen from a whole mini-batch.

    The loss then has a parameter `chosen_tokens`; called without it, it chooses among its own.
    """

    def mark(policy_loss: AnyPolicyLoss) -> AnyPolicyLoss:
        policy_loss.choose_tokens = choose  # type: ignore[attr-defined]
        return policy_loss

    return mark


def token_chooser(policy_loss: PolicyLoss) -> TokenChooser | None:
    """What `chooses_tokens` said; None of a loss that treats all tokens alike."""
    choose: TokenChooser | None = getattr(policy_loss, "choose_tokens", None)
    return choose


def without_ratio(policy_loss: AnyPolicyLoss) -> AnyPolicyLoss:
    """Say that a loss has no ratio to the old policy: the samples must be the policy's own."""
    policy_loss.has_ratio = False  # type: ignore[attr-defined]
    return policy_loss


def has_ratio(policy_loss: PolicyLoss) -> bool:
    """Whether it corrects updates after the first: unless `without_ratio` was said of it."""
    return getattr(policy_loss, "has_ratio", True)


@dataclass(frozen=True)
class SequenceRatio:
    """What `one_ratio_a_sequence` says."""

    is_clipped: bool
    """Whether the clip range bounds this ratio, not those of tokens."""
    longer_count_more: tuple[str, ...]
    """Names of the loss under which a sequence is to count as many times as it has tokens."""


def one_ratio_a_sequence(
    is_clipped: bool, longer_count_more: tuple[str, ...] = ()
) -> Callable[[AnyPolicyLoss], AnyPolicyLoss]:
    """Say that all tokens of a sequence have its one ratio (see `SequenceRatio`)."""

    def mark(policy_loss: AnyPolicyLoss) -> AnyPolicyLoss:
        said = SequenceRatio(is_clipped, longer_count_more)
        policy_loss.sequence_ratio = said  # type: ignore[attr-defined]
        return policy_loss

    return mark


def sequence_ratio(policy_loss: PolicyLoss) -> SequenceRatio | None:
    """What `one_ratio_a_sequence` said; None of a loss whose tokens have their own."""
    said: SequenceRatio | None = getattr(policy_loss, "sequence_ratio", None)
    return said


def clips_weights(policy_loss: AnyPolicyLoss) -> AnyPolicyLoss:
    """Say that a token outside the clip range keeps its gradient: the range may reach down to 0."""
    policy_loss.clips_weights = True  # type: ignore[attr-defined]
    return policy_loss


def is_clip_of_weights(policy_loss: PolicyLoss) -> bool:
    """Whether `clips_weights` was said of it."""
    return getattr(policy_loss, "clips_weights", False)


def get_policy_loss(name: str) -> PolicyLoss:
    """The policy loss of that name, or the user's own by its dotted path."""
    return POLICY_LOSSES.look_up(name)
