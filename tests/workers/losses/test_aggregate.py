"""Aggregation next to plain Python, with and without denominators."""

from __future__ import annotations

import pytest
import torch

from tests.workers.losses.plain_python import Columns, aggregate, denominators, tokens_of
from verl_like.errors import ConfigError
from workers.config import LOSS_AGG_MODES
from workers.losses.aggregate import agg_loss


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_aggregation_equals_plain_python(batch: Columns, mode: str, dtype: torch.dtype) -> None:
    losses, mask = batch["advantages"], batch["response_mask"]
    expected = pytest.approx(aggregate(tokens_of(losses, mask), mode))
    assert agg_loss(losses, mask.to(dtype), mode).item() == expected
    assert agg_loss(losses, mask.to(dtype), mode, **denominators(mask)).item() == expected


def test_the_norm_of_dr_grpo_divides_by_a_constant() -> None:
    losses, mask = torch.ones(2, 4), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    for factor, expected in ((None, (4 + 2) / 2 / 4), (10, 0.3)):
        loss = agg_loss(losses, mask, "seq-mean-token-sum-norm", loss_scale_factor=factor)
        assert loss.item() == pytest.approx(expected)


def test_an_unknown_aggregation_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown loss_agg_mode 'token_mean'.*Did you mean 'token-mean'"
    ):
        agg_loss(torch.ones(1, 1), torch.ones(1, 1), "token_mean")
