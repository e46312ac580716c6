"""The critic's loss beside plain Python, and cut into parts."""

import pytest
import torch

from tests.workers.losses.plain_python import aggregate, denominators, tokens_of
from workers.losses.aggregate import LOSS_AGG_MODES
from workers.losses.value import compute_value_loss


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_loss_is_half_the_worse_squared_error(batch, mode):
    mask, clip = batch["response_mask"], 0.5
    rows, held = [], []
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
            held.append(errors[1] > errors[0])
    loss, clipfrac = compute_value_loss(
        batch["vpreds"], batch["returns"], batch["values"], mask, clip, mode
    )
    assert loss.item() == pytest.approx(aggregate(rows, mode))
    assert clipfrac.item() == pytest.approx(sum(held) / len(held))


def test_the_value_loss_adds_up_over_parts_and_has_no_gradient_outside_the_mask(batch):
    leaf, mask = batch["vpreds"].clone().requires_grad_(), batch["response_mask"]
    whole, clipfrac = compute_value_loss(
        leaf, batch["returns"], batch["values"], mask, 0.5, "seq-mean-token-mean"
    )
    (gradient,) = torch.autograd.grad(whole, leaf)
    parts = [
        compute_value_loss(*row, 0.5, "seq-mean-token-mean", **denominators(mask))
        for row in zip(
            *(x.split(1) for x in (leaf, batch["returns"], batch["values"], mask)), strict=True
        )
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(sum(fraction for _, fraction in parts), clipfrac)
    sum(loss for loss, _ in parts).backward()
    torch.testing.assert_close(leaf.grad, gradient)
    assert (gradient[mask == 0] == 0).all()
