"""Masks with gaps and of any dtype, for every loss, correction, KL and masked operation.

A row with gaps gives the same result as the row without them. Every nonzero entry of a mask of any
dtype is inside. No argument is modified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.losses.plain_correction import LEVELS, corrected, threshold_of
from tests.workers.losses.plain_python import CONFIG, ROWS, WIDTH, Columns
from verl_like.tensor_ops import masked_mean, masked_sum
from workers.config import LOSS_AGG_MODES
from workers.losses.aggregate import agg_loss, compute_lm_loss
from workers.losses.correction import CRITERIA
from workers.losses.kl import KL_ESTIMATORS, MismatchGauge, kl_penalty
from workers.losses.registry import POLICY_LOSSES, traits_of
from workers.losses.value import compute_value_loss

Numbers = dict[str, Any]
Formula = Callable[[Columns], Numbers]
"""Columns of rows -> numbers, and columns [rows, R] that are compared where the mask is."""


def of_policy_loss(name: str, mode: str) -> Formula:
    def formula(columns: Columns) -> Numbers:
        loss, metrics = POLICY_LOSSES[name](
            old_log_prob=columns["old_log_prob"],
            log_prob=columns["log_prob"],
            advantages=columns["advantages"],
            response_mask=columns["response_mask"],
            rollout_is_weights=columns["weights"],
            loss_agg_mode=mode,
            loss_scale_factor=WIDTH,
            config=CONFIG,
        )
        (gradient,) = torch.autograd.grad(2 * loss, columns["log_prob"])
        return {"loss": loss, "gradient": gradient, **metrics}

    return formula


def of_chooser(name: str) -> Formula:
    choose: Any = traits_of(POLICY_LOSSES[name]).choose_tokens

    def formula(columns: Columns) -> Numbers:
        names = ("old_log_prob", "advantages", "response_mask")
        generator = torch.Generator().manual_seed(0)
        return {"chosen": choose(*(columns[each] for each in names), generator)}

    return formula


def of_value_loss(columns: Columns) -> Numbers:
    names = ("vpreds", "returns", "values", "response_mask")
    vpreds, returns, values, mask = (columns[name] for name in names)
    clipped = compute_value_loss(vpreds, returns, values, mask, cliprange_value=0.3)
    (gradient,) = torch.autograd.grad(clipped[0], columns["vpreds"])
    return {"clipped": clipped, "gradient": gradient}


def of_lm_loss(columns: Columns) -> Numbers:
    return {"lm": compute_lm_loss(columns["log_prob"], columns["response_mask"])}


def of_correction(**settings: Any) -> Formula:
    def formula(columns: Columns) -> Numbers:
        log_probs = columns["log_prob"].detach(), columns["old_log_prob"]
        weights, remaining, metrics = corrected(*log_probs, columns["response_mask"], **settings)
        return {"weights": weights, "remaining": remaining != 0, "metrics": metrics}

    return formula


def of_kl(columns: Columns) -> Numbers:
    losses = {}
    for name in KL_ESTIMATORS:
        kl = kl_penalty(columns["log_prob"].detach(), columns["old_log_prob"], name)
        for mode in LOSS_AGG_MODES:
            losses[f"{name} {mode}"] = agg_loss(
                kl, columns["response_mask"], mode, loss_scale_factor=WIDTH
            )
    return losses


def of_masked_operations(columns: Columns) -> Numbers:
    values, mask = columns["values"], columns["response_mask"]
    return {"sum": masked_sum(values, mask, axis=-1), "mean": masked_mean(values, mask)}


def of_mismatch(columns: Columns) -> Numbers:
    gauge = MismatchGauge(columns["response_mask"].shape[1])
    gauge.add(columns["old_log_prob"], columns["log_prob"], columns["response_mask"])
    metrics = gauge.metrics()
    # these metrics count positions of the whole response, with its gaps
    return {name: x for name, x in metrics.items() if "gap_from_token" not in name}


CHOOSING = [name for name, loss in POLICY_LOSSES.items() if traits_of(loss).choose_tokens]
FORMULAS: dict[str, Formula] = {
    **{
        f"{name} {mode}": of_policy_loss(name, mode)
        for name in POLICY_LOSSES
        for mode in LOSS_AGG_MODES
    },
    **{f"tokens of {name}": of_chooser(name) for name in CHOOSING},
    **{f"weights by {level}": of_correction(rollout_is=level) for level in LEVELS},
    **{
        f"rejection by {name}": of_correction(
            rollout_rs=name, rollout_rs_threshold=threshold_of(name)
        )
        for name in CRITERIA
    },
    "veto": of_correction(rollout_token_veto_threshold=0.5),
    "value loss": of_value_loss,
    "LM loss": of_lm_loss,
    "KL": of_kl,
    "masked operations": of_masked_operations,
    "mismatch": of_mismatch,
}


@pytest.fixture
def whole(batch: Columns) -> Columns:
    """Return rows without holes, and NaN after them."""
    mask = torch.arange(WIDTH) < batch["response_mask"].sum(dim=-1, keepdim=True)
    torch.manual_seed(1)
    columns = {
        name: torch.where(mask, torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.nan)
        for name in batch
    }
    columns["log_prob"] = columns["old_log_prob"] + 0.3 * columns["log_prob"]
    columns["weights"] = columns["weights"].abs()
    return columns | {"response_mask": mask}


def with_gradients(columns: Columns) -> Columns:
    grads = ("log_prob", "vpreds")
    return {n: c.clone().requires_grad_() if n in grads else c for n, c in columns.items()}


def flat(numbers: Numbers, mask: Tensor) -> dict[str, Any]:
    """Return every number or tensor by name, for columns inside the mask."""
    by_name: dict[str, Any] = {}
    for name, value in numbers.items():
        if isinstance(value, tuple):
            by_name |= {f"{name} {place}": item for place, item in enumerate(value)}
        elif isinstance(value, dict):
            by_name |= {f"{name} {key}": item for key, item in value.items()}
        else:
            by_name[name] = value
    for name, value in by_name.items():
        if isinstance(value, Tensor) and value.shape == mask.shape:
            by_name[name] = value[mask.bool()]
    return {n: torch.as_tensor(x).double() for n, x in by_name.items() if x is not None}


def assert_equal(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert results.keys() == expected.keys()
    for name, value in results.items():
        same = torch.allclose(value, expected[name], equal_nan=True)
        assert same, f"{name}: {value} is not {expected[name]}"


@pytest.mark.parametrize("name", FORMULAS)
def test_a_row_with_gaps_gives_the_result_without_gaps(name: str, whole: Columns) -> None:
    mask = whole["response_mask"]
    generator = torch.Generator().manual_seed(3)
    places = torch.rand(ROWS, 2 * WIDTH, generator=generator).argsort(dim=-1).argsort(dim=-1)
    wide = places < mask.sum(dim=-1, keepdim=True)
    gaps = {
        key: torch.full(wide.shape, torch.nan, dtype=column.dtype).masked_scatter_(
            wide, column[mask]
        )
        for key, column in whole.items()
        if key != "response_mask"
    }
    gaps["response_mask"] = wide
    compact = flat(FORMULAS[name](with_gradients(whole)), mask)
    assert_equal(flat(FORMULAS[name](with_gradients(gaps)), wide), compact)


@pytest.mark.parametrize("name", FORMULAS)
def test_values_outside_the_mask_change_no_bit(name: str, batch: Columns) -> None:
    batch["weights"] = batch["weights"].abs()
    mask = batch["response_mask"]
    outside = mask == 0
    assert outside.any()
    expected = flat(FORMULAS[name](with_gradients(batch)), mask)
    for garbage in (torch.nan, -torch.inf, 1e30):
        other = {
            key: column if key == "response_mask" else column.masked_fill(outside, garbage)
            for key, column in batch.items()
        }
        results = flat(FORMULAS[name](with_gradients(other)), mask)
        for key, value in expected.items():
            assert torch.equal(results[key].nan_to_num(7), value.nan_to_num(7)), key


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float64])
@pytest.mark.parametrize("name", FORMULAS)
def test_mask_dtypes_give_equal_results_and_modify_no_input(
    name: str, dtype: torch.dtype, batch: Columns
) -> None:
    batch["weights"] = batch["weights"].abs()
    mask = batch["response_mask"]
    expected = flat(FORMULAS[name](with_gradients(batch)), mask)

    doubled = mask if dtype == torch.bool else 2 * mask
    inputs = with_gradients(batch | {"response_mask": doubled.to(dtype)})
    before = {key: column.detach().clone() for key, column in inputs.items()}
    assert_equal(flat(FORMULAS[name](inputs), mask), expected)
    for key, column in before.items():
        assert torch.equal(inputs[key].detach().nan_to_num(7), column.nan_to_num(7)), key


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_nan_old_log_prob_gives_a_non_finite_gradient(name: str, whole: Columns) -> None:
    row, place = whole["response_mask"].nonzero()[0].tolist()
    whole["old_log_prob"] = whole["old_log_prob"].clone()
    whole["old_log_prob"][row, place] = torch.nan
    results = of_policy_loss(name, "token-mean")(with_gradients(whole))
    assert results["loss"].isnan() != results["gradient"].isfinite().all()
    assert results["loss"].isnan() or name in ("reinforce", "gpg")  # they read no old log-probs
