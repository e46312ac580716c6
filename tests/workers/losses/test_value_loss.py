"""The critic's loss next to plain Python, whole and row by row."""

from __future__ import annotations

import pytest
import torch

from tests.workers.losses.plain_python import Columns, Rows, aggregate, denominators, tokens_of
from workers.config import LOSS_AGG_MODES
from workers.losses.value import compute_value_loss


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_loss_is_half_the_worse_squared_error(batch: Columns, mode: str) -> None:
    mask, clip = batch["response_mask"], 0.5
    rows: Rows = []
    clipped = []
    for row in zip(
        *(tokens_of(batch[name], mask) for name in ("vpreds", "returns", "values")), strict=True
    ):
        rows.append([])
        for vpred, target, value in zip(*row, strict=True):
            errors = (
                (vpred - target) ** 2,
                (min(max(vpred, value - clip), value + clip) - target) ** 2,
            )
            rows[-1].append(0.5 * max(errors))
            clipped.append(errors[1] > errors[0])
    loss, clipfrac = compute_value_loss(
        batch["vpreds"], batch["returns"], batch["values"], mask, clip, mode
    )
    assert loss.item() == pytest.approx(aggregate(rows, mode))
    assert clipfrac.item() == pytest.approx(sum(clipped) / len(clipped))


def test_the_value_loss_adds_up_over_rows_and_is_zero_outside_the_mask(
    batch: Columns,
) -> None:
    leaf, mask = batch["vpreds"].clone().requires_grad_(), batch["response_mask"]
    whole, clipfrac = compute_value_loss(
        leaf, batch["returns"], batch["values"], mask, 0.5, "seq-mean-token-mean"
    )
    (gradient,) = torch.autograd.grad(whole, leaf)
    columns = [column.split(1) for column in (leaf, batch["returns"], batch["values"], mask)]
    parts = []
    for vpreds, returns, values, inside in zip(*columns, strict=True):
        row = vpreds, returns, values, inside, 0.5, "seq-mean-token-mean"
        parts.append(compute_value_loss(*row, **denominators(mask)))
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(sum(fraction for _, fraction in parts), clipfrac)
    sum(loss for loss, _ in parts).backward()
    torch.testing.assert_close(leaf.grad, gradient)
    assert (gradient[mask == 0] == 0).all()
