"""The critic's loss next to plain Python, whole and in parts."""

from __future__ import annotations

import pytest
import torch

from tests.workers.losses.plain_python import Columns, Rows, aggregate, denominators, tokens_of
from workers.config import LOSS_AGG_MODES
from workers.losses import blocks
from workers.losses.value import compute_huber_value_loss, compute_value_loss


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_loss_is_half_the_worse_squared_error(batch: Columns, mode: str) -> None:
    mask, clip = batch["response_mask"], 0.5
    rows: Rows = []
    held = []
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


def test_the_value_loss_adds_up_over_parts_and_has_no_gradient_outside_the_mask(
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


@pytest.mark.parametrize("name", ["clipped", "huber"])
def test_the_blocks_of_a_large_batch_do_not_show(
    batch: Columns, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for block_tokens in (10**6, 8):
        monkeypatch.setattr(blocks, "BLOCK_TOKENS", block_tokens)
        leaf = batch["vpreds"].clone().requires_grad_()
        returns, values, mask = batch["returns"], batch["values"], batch["response_mask"]
        if name == "huber":
            loss, share = compute_huber_value_loss(leaf, returns, mask, 0.8)
        else:
            loss, share = compute_value_loss(leaf, returns, values, mask, 0.5)
        loss.backward()
        found.append((loss.detach(), share, leaf.grad))
    for whole, in_parts in zip(*found, strict=True):
        torch.testing.assert_close(in_parts, whole)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_huber_s_loss_is_square_near_and_linear_far(batch: Columns, mode: str) -> None:
    mask, delta = batch["response_mask"], 0.8
    rows, far = [], []
    for row in zip(*(tokens_of(batch[name], mask) for name in ("vpreds", "returns")), strict=True):
        errors = [abs(vpred - target) for vpred, target in zip(*row, strict=True)]
        rows.append([e**2 / 2 if e <= delta else delta * (e - delta / 2) for e in errors])
        far += [error > delta for error in errors]
    assert {True, False} == set(far)
    loss, share = compute_huber_value_loss(batch["vpreds"], batch["returns"], mask, delta, mode)
    assert loss.item() == pytest.approx(aggregate(rows, mode))
    assert share.item() == pytest.approx(sum(far) / len(far))


def test_huber_s_loss_adds_up_over_parts_with_the_gradient_of_finite_differences(
    batch: Columns,
) -> None:
    mask, returns = batch["response_mask"], batch["returns"]
    leaf = batch["vpreds"].clone().requires_grad_()
    parts = zip(leaf.split(2), returns.split(2), mask.split(2), strict=True)
    total = sum(compute_huber_value_loss(*part, 0.8, **denominators(mask))[0] for part in parts)
    whole, _ = compute_huber_value_loss(leaf, returns, mask, 0.8)
    torch.testing.assert_close(total, whole)
    (gradient,) = torch.autograd.grad(total, leaf)
    assert (gradient[mask == 0] == 0).all()

    clean = leaf.detach().nan_to_num().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda vpreds: compute_huber_value_loss(vpreds, returns.nan_to_num(), mask, 0.8)[0], [clean]
    )


def test_huber_s_loss_on_two_rows_of_four_tokens_worked_by_hand() -> None:
    vpreds = torch.tensor([[0.0, 1.0, 9.0, 9.0], [2.0, -1.0, 0.5, 0.0]])
    returns = torch.tensor([[0.5, -2.0, 0.0, 0.0], [2.0, 0.0, 4.5, 1.5]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    loss, share = compute_huber_value_loss(vpreds, returns, mask, 1.0)
    # by token: 0.125, 2.5 | 0, 0.5, 3.5, 1.0
    assert loss.item() == pytest.approx((0.125 + 2.5 + 0.0 + 0.5 + 3.5 + 1.0) / 6)
    assert share.item() == pytest.approx(3 / 6)
