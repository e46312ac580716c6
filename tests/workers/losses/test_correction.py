"""Importance weights of the rollout correction beside plain Python."""

import math

import pytest
import torch

from tests.workers.losses.plain_python import tokens_of
from verl_like.errors import ConfigError
from workers.losses.aggregate import agg_policy_loss
from workers.losses.correction import compute_rollout_importance_weights


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_equal_plain_python(batch, level, mode):
    mask, threshold = batch["response_mask"], 1.4
    weights = compute_rollout_importance_weights(
        batch["log_prob"],
        batch["old_log_prob"],
        mask,
        rollout_is=level,
        rollout_is_mode=mode,
        rollout_is_threshold=threshold,
    )
    assert (weights[mask == 0] == 0).all()
    for old, new, row in zip(
        *(
            tokens_of(column, mask)
            for column in (batch["old_log_prob"], batch["log_prob"], weights)
        ),
        strict=True,
    ):
        ratios = [math.exp(b - a) for a, b in zip(old, new, strict=True)]
        if level == "sequence":
            ratios = [math.prod(ratios)] * len(ratios)
        if mode == "truncate":
            assert row == pytest.approx([min(ratio, threshold) for ratio in ratios])
        else:
            assert row == pytest.approx(
                [ratio if 1 / threshold <= ratio <= threshold else 0.0 for ratio in ratios]
            )


def test_a_rejected_token_stays_in_the_denominator():
    mask = torch.ones(1, 4)
    old = torch.zeros(1, 4)
    rollout = torch.tensor([[0.0, 0.0, -3.0, -3.0]])  # the last two weigh e^3: rejected
    weights = compute_rollout_importance_weights(old, rollout, mask, rollout_is_mode="mask")
    assert weights.tolist() == [[1.0, 1.0, 0.0, 0.0]]

    losses = torch.full((1, 4), 2.0)
    loss, _ = agg_policy_loss(losses, {}, mask, "token-mean", weights)
    assert loss == pytest.approx(2.0 * 2 / 4)


def test_importance_weights_have_no_gradient(batch):
    leaf = batch["log_prob"].clone().requires_grad_()
    assert not compute_rollout_importance_weights(
        leaf, batch["old_log_prob"], batch["response_mask"]
    ).requires_grad


@pytest.mark.parametrize(
    "wrong", [{"rollout_is": "row"}, {"rollout_is_mode": "clip"}, {"rollout_is_threshold": 0.5}]
)
def test_importance_settings_that_mean_nothing_are_refused(batch, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        compute_rollout_importance_weights(
            batch["log_prob"], batch["old_log_prob"], batch["response_mask"], **wrong
        )
