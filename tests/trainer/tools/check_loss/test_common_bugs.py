"""Bugs that users write into their own losses: each is named. Correct variants raise no alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.trainer.tools.check_loss.stand_ins import few_batches
from trainer.tools.check_loss import BrokenRelation, check_loss


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    return (log_prob - old_log_prob).where(mask > 0, 0).clamp(-20, 20)


def subtracts_in_place(log_prob, old_log_prob, advantages, mask, batch_num_tokens):
    log_prob -= old_log_prob
    ratio = log_prob.clamp(-20, 20).exp()
    return -(ratio * advantages).where(mask > 0, 0).sum() / max(batch_num_tokens, 1)


def swapped_pair(log_probs, ref_log_probs, beta):
    gain = log_probs - ref_log_probs
    return -logsigmoid(beta * (gain[:, 1] - gain[:, 0]))


def log_of_sigmoid(log_probs, ref_log_probs, beta):
    gain = log_probs - ref_log_probs
    return -torch.log(torch.sigmoid(50 * beta * (gain[:, 0] - gain[:, 1])))


def rewards_changed(token_level_rewards, old_log_prob, ref_log_prob, response_mask):
    token_level_rewards -= 0.1 * (old_log_prob - ref_log_prob) * response_mask
    return token_level_rewards.sum(1, keepdim=True) * response_mask


def bootstraps_beyond_the_end(token_level_rewards, values, response_mask):
    following = torch.cat([values[:, 1:], 0 * values[:, :1]], dim=1)
    return (token_level_rewards + 0.9 * following - values) * response_mask


def always_nan(log_prob, mask, batch_num_tokens):
    return -log_prob.log().where(mask > 0, 0).sum() / max(batch_num_tokens, 1)


def root_of_masked_tokens(log_prob, mask, batch_num_tokens):
    return (-log_prob * mask).sqrt().sum() / max(batch_num_tokens, 1)


def number_in_the_middle(log_prob, mask, batch_num_tokens):
    inside = log_prob.where(mask > 0, 0)
    sizes = torch.tensor([1 + row.square().sum().item() for row in inside])
    return -(inside.sum(1) * sizes).sum() / max(batch_num_tokens, 1)


def clipped_both_ways(log_prob, old_log_prob, advantages, mask):
    """Return -A r and -A clip(r) of each token."""
    ratio = log_ratio(log_prob, old_log_prob, mask).exp()
    advantages = advantages.where(mask > 0, 0)
    return -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)


def optimistic_clip(log_prob, old_log_prob, advantages, mask, batch_num_tokens):
    free, clipped = clipped_both_ways(log_prob, old_log_prob, advantages, mask)
    return torch.minimum(free, clipped).sum() / max(batch_num_tokens, 1)


def clipped_alone(log_prob, old_log_prob, advantages, mask, batch_num_tokens):
    _, clipped = clipped_both_ways(log_prob, old_log_prob, advantages, mask)
    return clipped.sum() / max(batch_num_tokens, 1)


def clipped_below_alone(log_prob, old_log_prob, advantages, mask, batch_num_tokens):
    ratio = log_ratio(log_prob, old_log_prob, mask).exp().clamp(min=0.8)
    return -(advantages.where(mask > 0, 0) * ratio).sum() / max(batch_num_tokens, 1)


EXTREME = ("nan_outside", "extreme_ratios")
BUGS: list[tuple[Callable[..., Any], str]] = [
    (subtracts_in_place, "no_side_effects"),
    (rewards_changed, "no_side_effects"),
    (bootstraps_beyond_the_end, "numbers_outside"),
    (swapped_pair, "better_side"),
    (log_of_sigmoid, "extreme_ratios"),
    (always_nan, "finite_numbers"),
    (root_of_masked_tokens, "finite_numbers"),
    (number_in_the_middle, "finite_differences"),
    (optimistic_clip, "wrong_way"),
    (clipped_alone, "wrong_way"),
    (clipped_below_alone, "wrong_way"),
]


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(("function", "relation"), BUGS, ids=[bug[0].__name__ for bug in BUGS])
def test_a_common_bug_breaks_its_relation(
    function: Callable[..., Any], relation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_batches(monkeypatch)
    with pytest.raises(BrokenRelation) as caught:
        check_loss(function)
    assert caught.value.relation == relation


def test_a_token_that_moved_the_wrong_way_is_named() -> None:
    words = (
        r"gradient's sign is -?0, not 1, where a token with an advantage of -1 is twice as likely "
        r"as before\. Likely cause: .* take the larger"
    )
    with pytest.raises(BrokenRelation, match=words):
        check_loss(optimistic_clip)


def test_low_precision_is_reported_as_the_likely_cause() -> None:
    def rounded(log_prob, mask, batch_num_tokens):
        return -log_prob.bfloat16().where(mask > 0, 0).sum() / max(batch_num_tokens, 1)

    with pytest.raises(BrokenRelation, match="Likely cause: it rounds numbers to torch.bfloat16; "):
        check_loss(rounded)


def test_a_loss_that_is_always_nan_is_reported_on_an_ordinary_batch() -> None:
    words = "loss is nan, not 0, on an ordinary batch. Likely cause: the logarithm or root of zero"
    with pytest.raises(BrokenRelation, match=words):
        check_loss(always_nan)


def test_a_change_in_place_does_not_break_other_relations(monkeypatch: pytest.MonkeyPatch) -> None:
    few_batches(monkeypatch)
    assert "micro_batch_cut" in check_loss(subtracts_in_place, skip=["no_side_effects", *EXTREME])
    assert "row_permutation" in check_loss(rewards_changed, skip=["no_side_effects"])


def low_precision_of_the_mask(log_prob, mask, batch_num_tokens):
    return -(log_prob.where(mask > 0, 0) * mask.bfloat16()).sum() / max(batch_num_tokens, 1)


def single_precision(log_prob, old_log_prob, advantages, mask, batch_num_tokens):
    ratio = log_ratio(log_prob.float(), old_log_prob.float(), mask).exp()
    advantages = advantages.where(mask > 0, 0).float()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return losses.sum() / max(batch_num_tokens, 1)


def weight_without_gradient(log_prob, old_log_prob, advantages, mask, batch_num_tokens):
    with torch.no_grad():
        weight = log_ratio(log_prob, old_log_prob, mask).exp()
        weight *= advantages.where(mask > 0, 0)
    return -(weight * log_prob.where(mask > 0, 0)).sum() / max(batch_num_tokens, 1)


def kl_without_advantages(log_prob, ref_log_prob, mask, batch_num_tokens):
    difference = log_ratio(ref_log_prob, log_prob, mask)
    return (difference.exp() - 1 - difference).sum() / max(batch_num_tokens, 1)


def pessimistic_clip_with_a_kl(
    log_prob, old_log_prob, ref_log_prob, advantages, mask, batch_num_tokens
):
    losses = torch.maximum(*clipped_both_ways(log_prob, old_log_prob, advantages, mask))
    kl = kl_without_advantages(log_prob, ref_log_prob, mask, batch_num_tokens)
    return losses.sum() / max(batch_num_tokens, 1) + 2 * kl


class Module(torch.nn.Module):
    def forward(self, log_prob, mask, batch_num_tokens):
        return -log_prob.where(mask > 0, 0).sum() / max(batch_num_tokens, 1)


@pytest.mark.parametrize(
    "function",
    [
        single_precision,
        low_precision_of_the_mask,
        weight_without_gradient,
        kl_without_advantages,
        pessimistic_clip_with_a_kl,
        Module(),
    ],
)
def test_a_correct_variant_passes(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_batches(monkeypatch)
    assert "finite_differences" in check_loss(function)
