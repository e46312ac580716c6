"""Masks with gaps, and garbage outside of them."""

import pytest
import torch

from tests.trainer.ppo.advantages.plain_python import ROWS, WIDTH, whole_batch
from tests.trainer.ppo.advantages.test_every_estimator import EVERY_SETTING, arguments_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS


def compact_batch():
    """Return rows of 6, 4, 1, 0, 6, 3 and 2 tokens, with garbage after them."""
    torch.manual_seed(0)
    mask = torch.arange(WIDTH) < torch.tensor([[6], [4], [1], [0], [6], [3], [2]])
    rewards, values = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    return whole_batch(rewards * mask, values, mask)


def spread(column, mask, wide, filling):
    """Move the tokens inside `mask` to the positions of `wide`."""
    return filling.clone().masked_scatter_(wide, column[mask])


@pytest.mark.parametrize(("name", "settings"), EVERY_SETTING)
def test_gaps_change_no_advantage(name, settings):
    batch = compact_batch()
    mask = batch.batch["response_mask"]
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(ROWS, 2 * WIDTH, generator=generator).argsort(dim=-1).argsort(dim=-1)
    wide = order < mask.sum(dim=-1, keepdim=True)

    arguments = arguments_of(name, batch, settings)
    with_gaps = {}
    for key, column in arguments.items():
        with_gaps[key] = column
        if isinstance(column, torch.Tensor) and column.shape == mask.shape:
            garbage = torch.randn(wide.shape, generator=generator).to(column.dtype)
            filling = torch.zeros_like(garbage) if key.startswith("token_level") else garbage
            with_gaps[key] = spread(column, mask, wide, filling)
    with_gaps["response_mask"] = wide

    expected = ADVANTAGE_ESTIMATORS[name](**arguments)
    for spaced, compact in zip(ADVANTAGE_ESTIMATORS[name](**with_gaps), expected, strict=True):
        torch.testing.assert_close(spaced[wide], compact[mask])


@pytest.mark.parametrize(("name", "settings"), EVERY_SETTING)
def test_observed_tokens_change_no_bit(columns, name, settings):
    batch = whole_batch(*columns)
    outside = columns[2] == 0
    assert outside.any()
    arguments = arguments_of(name, batch, settings)
    expected = ADVANTAGE_ESTIMATORS[name](**arguments)
    for garbage in (torch.nan, -torch.inf, 1e30):
        other = dict(arguments)
        for key in arguments.keys() & {"values", "old_log_probs", "sum_pi_squared"}:
            other[key] = arguments[key].masked_fill(outside, garbage)
        for result, clean in zip(ADVANTAGE_ESTIMATORS[name](**other), expected, strict=True):
            assert torch.equal(result[~outside], clean[~outside])
