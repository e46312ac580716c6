"""Masked reductions next to those of the selected values."""

import math

import pytest
import torch

from verl_like.tensor_ops import (
    last_places,
    masked_mean,
    masked_sum,
    zero_outside,
)

MASK_DTYPES = [torch.bool, torch.int64, torch.float32]


@pytest.fixture(params=MASK_DTYPES, ids=str)
def masked(request):
    """Return values whose masked-out half is NaN, and the mask."""
    torch.manual_seed(0)
    mask = torch.rand(5, 9) < 0.5
    values = torch.where(mask, torch.randn(5, 9), torch.nan)
    return values, mask.to(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_zero_outside_equals_where_bit_for_bit(masked, dtype):
    values, mask = masked
    values = values.nan_to_num(posinf=1).to(dtype) if dtype == torch.int64 else values.to(dtype)
    result = zero_outside(values, mask)
    assert result.dtype == dtype
    assert torch.equal(result, torch.where(mask.bool(), values, 0))
    assert not result.double().isnan().any()


def test_zero_outside_has_the_gradients_and_shapes_of_where(masked):
    values, mask = masked
    rows = torch.randn(5, 1).requires_grad_()
    for leaf in (values.clone().requires_grad_(), rows):
        grad, expected = (
            torch.autograd.grad((2 * result.square()).sum(), leaf)[0]
            for result in (zero_outside(leaf, mask), torch.where(mask.bool(), leaf, 0))
        )
        torch.testing.assert_close(grad, expected)
    assert zero_outside(values, mask[:, :1]).shape == values.shape


def test_nan_inside_the_mask_is_kept():
    values = torch.tensor([torch.nan, torch.inf, torch.nan])
    assert zero_outside(values, torch.tensor([1, 1, 0]))[:2].tolist() == pytest.approx(
        [math.nan, math.inf], nan_ok=True
    )


def test_masked_reductions_equal_reductions_of_selected_values(masked):
    values, mask = masked
    inside = values[mask.bool()]
    torch.testing.assert_close(masked_sum(values, mask), inside.sum())
    torch.testing.assert_close(masked_mean(values, mask), inside.mean())


def test_masked_reductions_along_an_axis_equal_reductions_by_row(masked):
    values, mask = masked
    by_row = [row[inside.bool()] for row, inside in zip(values, mask, strict=True)]
    torch.testing.assert_close(
        masked_sum(values, mask, axis=-1), torch.stack([row.sum() for row in by_row])
    )
    torch.testing.assert_close(
        masked_mean(values, mask, axis=-1), torch.stack([row.mean() for row in by_row])
    )
    torch.testing.assert_close(masked_mean(values, mask, axis=(0, 1)), masked_mean(values, mask))


def test_an_empty_mask_gives_zero_everywhere():
    values, mask = torch.full((2, 3), torch.nan), torch.zeros(2, 3, dtype=torch.int64)
    for result in (
        masked_sum(values, mask),
        masked_mean(values, mask),
        masked_mean(values, mask, axis=-1),
    ):
        assert (result == 0).all()


def test_masked_mean_has_no_gradient_outside_the_mask():
    values = torch.tensor([1.0, torch.nan, 3.0], requires_grad=True)
    masked_mean(values, torch.tensor([1, 0, 1])).backward()
    assert values.grad.tolist() == [0.5, 0.0, 0.5]


def test_last_places_handles_masks_with_holes() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert last_places(mask).tolist() == [2, 0, 3]
    assert last_places(mask.bool()).tolist() == [2, 0, 3]
