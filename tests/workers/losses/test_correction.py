"""Weights and rejection of the rollout correction next to plain Python, and their thresholds."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from tests.workers.losses.plain_correction import (
    LEVELS,
    corrected,
    plain_keeps,
    plain_log_ratios,
    plain_ratios,
    plain_values,
    threshold_of,
)
from tests.workers.losses.plain_python import Columns, Rows, tokens_of
from verl_like.errors import ConfigError
from workers.config import RolloutCorrectionConfig
from workers.losses.aggregate import agg_policy_loss
from workers.losses.correction import CRITERIA, RolloutCorrection, normalized


@pytest.mark.parametrize("threshold", ["1.4", "0.7_1.4"])
@pytest.mark.parametrize("level", LEVELS)
def test_importance_weights_equal_plain_python(batch: Columns, level: str, threshold: str) -> None:
    mask = batch["response_mask"]
    weights, remaining, _ = corrected(
        *(batch["log_prob"], batch["old_log_prob"], mask),
        rollout_is=level,
        rollout_is_threshold=threshold,
    )
    assert (weights[mask == 0] == 0).all()
    assert torch.equal(remaining, mask)
    for row, applied in zip(plain_log_ratios(batch), tokens_of(weights, mask), strict=True):
        ratios = plain_ratios(row, level)
        if threshold == "1.4":
            assert applied == pytest.approx([min(ratio, 1.4) for ratio in ratios])
        else:
            inside = [ratio if 0.7 <= ratio <= 1.4 else 0.0 for ratio in ratios]
            assert applied == pytest.approx(inside)


@pytest.mark.parametrize("name", CRITERIA)
def test_rejection_equals_plain_python(batch: Columns, name: str) -> None:
    mask = batch["response_mask"]
    weights, remaining, _ = corrected(
        *(batch["log_prob"], batch["old_log_prob"], mask),
        rollout_rs=name,
        rollout_rs_threshold=threshold_of(name),
    )
    assert weights is None
    assert (remaining[mask == 0] == 0).all()
    expected = [
        [plain_keeps(value, name) for value in plain_values(row, name)]
        for row in plain_log_ratios(batch)
    ]
    assert tokens_of(remaining.bool(), mask) == expected
    assert 0 < remaining.sum() < mask.sum(), "the example keeps or rejects every token"


def test_a_token_that_one_of_several_criteria_rejects_is_rejected(batch: Columns) -> None:
    inputs = batch["log_prob"], batch["old_log_prob"], batch["response_mask"]
    names, thresholds = "token_k1,seq_max_k3", "0.6_1.4,0.2"
    _, both, _ = corrected(*inputs, rollout_rs=names, rollout_rs_threshold=thresholds)
    _, first, _ = corrected(*inputs, rollout_rs="token_k1", rollout_rs_threshold="0.6_1.4")
    _, second, _ = corrected(*inputs, rollout_rs="seq_max_k3", rollout_rs_threshold="0.2")
    assert torch.equal(both, first * second)
    assert not torch.equal(both, first)
    assert not torch.equal(both, second)


HALF, EIGHTH, TWICE = math.log(0.5), math.log(0.125), math.log(2.0)
RATIOS = torch.tensor([[TWICE, HALF, 0.0, 99.0], [EIGHTH, 0.0, TWICE, HALF]])
"""Log-ratios of two rows of four tokens; the last one of the first row is outside the mask."""
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def test_one_token_below_the_veto_rejects_its_sequence() -> None:
    settings = {"rollout_token_veto_threshold": 0.2}
    _, remaining, metrics = corrected(RATIOS, torch.zeros(2, 4), MASK, **settings)
    assert remaining.tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == 1 / 7


def test_a_token_without_weight_stays_in_the_denominator() -> None:
    mask, rollout = torch.ones(1, 4), torch.tensor([[0.0, 0.0, -3.0, -3.0]])
    settings = {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"}
    weights, remaining, _ = corrected(torch.zeros(1, 4), rollout, mask, **settings)
    assert weights.tolist() == [[1.0, 1.0, 0.0, 0.0]]
    assert torch.equal(remaining, mask)

    loss, _ = agg_policy_loss(torch.full((1, 4), 2.0), {}, remaining, "token-mean", weights)
    assert loss == pytest.approx(2.0 * 2 / 4)


def test_a_token_with_a_non_finite_log_prob_is_rejected() -> None:
    behavior = torch.tensor([[0.0, math.nan, -math.inf, 0.0]])
    mask, zeros = torch.ones(1, 4, dtype=torch.int64), torch.zeros(1, 4)
    for name in CRITERIA:
        threshold = "0.5_2.0" if name.endswith("k1") else "0.5"
        _, remaining, _ = corrected(
            zeros, behavior, mask, rollout_rs=name, rollout_rs_threshold=threshold
        )
        assert remaining.tolist() == [[1, 0, 0, 1] if name.startswith("token") else [0] * 4], name

    weighted = {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"}
    weights, _, _ = corrected(zeros, behavior, mask, **weighted)
    assert weights.tolist() == [[1.0, 0.0, 0.0, 1.0]]
    for level in LEVELS:
        weights, _, _ = corrected(zeros, behavior, mask * 0, rollout_is=level)
        assert weights.sum() == 0, "values outside the mask have no effect"
    _, remaining, _ = corrected(zeros, behavior, mask, rollout_token_veto_threshold=0.1)
    assert remaining.sum() == 0


def test_ratios_that_would_overflow_are_clamped() -> None:
    far = torch.full((1, 4), -400.0)
    for level in LEVELS:
        weights, _, metrics = corrected(
            torch.zeros(1, 4), far, torch.ones(1, 4), rollout_is=level, rollout_is_threshold="2.0"
        )
        assert weights.tolist() == [[2.0] * 4]
        assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("level", LEVELS)
def test_normalized_weights_have_mean_one_over_tokens_or_over_rows(
    batch: Columns, level: str
) -> None:
    mask = batch["response_mask"]
    inputs = batch["log_prob"], batch["old_log_prob"], mask
    weights, _, _ = corrected(*inputs, rollout_is=level)
    scaled, mean = normalized(weights, mask.bool(), level)
    rows = [row for row in tokens_of(weights, mask) if row]
    values = sum(rows, []) if level == "token" else [row[0] for row in rows]
    assert mean == pytest.approx(sum(values) / len(values))
    torch.testing.assert_close(scaled * mean, weights)


def test_weights_that_are_all_zero_are_not_normalized() -> None:
    weights, mean = normalized(torch.zeros(2, 3), torch.ones(2, 3).bool(), "token")
    assert (mean, weights.sum().item()) == (1.0, 0.0)


def test_correction_has_no_gradient(batch: Columns) -> None:
    leaf = batch["log_prob"].clone().requires_grad_()
    settings = {"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1", "rollout_is": "token"}
    weights, remaining, _ = corrected(
        leaf, batch["old_log_prob"], batch["response_mask"], **settings
    )
    assert not weights.requires_grad
    assert not remaining.requires_grad


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"rollout_is_threshold": "0.9"},
            "rollout_is_threshold=0.9: where the policies agree, the weight is 1",
        ),
        (
            {"rollout_is_threshold": "2.0_0.5"},
            "the lower bound is 2 and must be above 0 and below 1",
        ),
        ({"rollout_is_threshold": "much"}, "is neither a number, such as 2.0, nor a range"),
        ({"rollout_is_threshold": 0.55}, "Write both bounds with a decimal point: 0.5_5.0"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold=None has 0 thresholds"),
        ({"rollout_rs": "tokn_k1", "rollout_rs_threshold": "2"}, "Did you mean 'token_k1'"),
        ({"rollout_rs": "token_k1,token_k1", "rollout_rs_threshold": "2"}, "token_k1 twice"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2,3"}, "has 1 criteria, but"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1"}, "policies have the ratio 1"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "token_k2 takes one upper"),
        (
            {"rollout_token_veto_threshold": 1.0},
            "above 0 and below 1 (the ratio of equal policies)",
        ),
        (
            {
                "rollout_is": "token",
                "rollout_is_threshold": "0.5_2.0",
                "rollout_token_veto_threshold": 0.6,
            },
            "above 0 and below 0.5 (the lower rollout_is_threshold)",
        ),
    ],
)
def test_invalid_settings_are_rejected_with_their_key(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="algorithm.rollout_correction") as caught:
        RolloutCorrection.from_config(RolloutCorrectionConfig(**settings))
    assert words in str(caught.value)


def test_one_threshold_of_a_ratio_also_bounds_its_inverse() -> None:
    correction = RolloutCorrection.from_config(
        RolloutCorrectionConfig(rollout_rs="token_k1,seq_sum_k1", rollout_rs_threshold="2")
    )
    for criterion in correction.criteria:
        assert (criterion.bounds.lower, criterion.bounds.upper) == pytest.approx((HALF, TWICE))


def metrics_of(
    values: Rows,
    raw: Rows,
    judged: list[float],
    extremes: list[float],
    bounds: tuple[float, float],
    *,
    floor: float,
    ideal: float,
    fraction: str,
) -> dict[str, float]:
    """Return the metrics of `Spread`, from each row's values with and without bounds."""
    lower, upper = bounds
    tokens: list[float] = sum(values, [])
    rows, raw_rows = means_of(values), means_of(raw)
    clamped = [min(max(value, floor), upper) for value in tokens]
    return {
        "mean": sum(tokens) / len(tokens),
        "std": statistics.pstdev(clamped),
        "max": max(extremes),
        "min": min(extremes),
        f"{fraction}_high": fraction_of([value > upper for value in judged]),
        f"{fraction}_low": fraction_of([value < lower for value in judged]),
        "seq_mean": sum(rows) / len(rows),
        "seq_std": statistics.stdev(rows),
        "seq_max": max(rows),
        "seq_min": min(rows),
        "seq_max_deviation": max(abs(row - ideal) for row in rows),
        "seq_fraction_high": fraction_of([row > upper for row in raw_rows]),
        "seq_fraction_low": fraction_of([row < lower for row in raw_rows]),
    }


def means_of(values: Rows) -> list[float]:
    return [sum(row) / len(row) for row in values if row]


def fraction_of(flags: list[bool]) -> float:
    return sum(flags) / len(flags)


@pytest.mark.parametrize("threshold", ["1.4", "0.7_1.4"])
@pytest.mark.parametrize("level", LEVELS)
def test_metrics_of_weights_equal_plain_python(batch: Columns, level: str, threshold: str) -> None:
    mask = batch["response_mask"]
    weights, _, metrics = corrected(
        *(batch["log_prob"], batch["old_log_prob"], mask),
        rollout_is=level,
        rollout_is_threshold=threshold,
    )
    applied = tokens_of(weights, mask)
    raw = [plain_ratios(row, level) for row in plain_log_ratios(batch)]
    judged = sum(raw, []) if level == "token" else [row[0] for row in raw if row]
    extremes = sum(applied, []) if level == "token" else judged
    bounds = (0.7 if "_" in threshold else 1 / 1.4, 1.4)
    expected = metrics_of(
        *(applied, raw, judged, extremes, bounds), floor=0.0, ideal=1.0, fraction="ratio_fraction"
    )

    tokens = sum(applied, [])
    squares = sum(weight**2 for weight in tokens) / len(tokens)
    expected["eff_sample_size"] = (sum(tokens) / len(tokens)) ** 2 / squares
    if "_" in threshold:
        expected["oob_ratio"] = fraction_of([not 0.7 <= ratio <= 1.4 for ratio in sum(raw, [])])
    assert metrics == pytest.approx(
        {f"rollout_corr/rollout_is_{name}": value for name, value in expected.items()}
    )


@pytest.mark.parametrize("name", CRITERIA)
def test_metrics_of_a_criterion_equal_plain_python(batch: Columns, name: str) -> None:
    _, _, metrics = corrected(
        *(batch["log_prob"], batch["old_log_prob"], batch["response_mask"]),
        rollout_rs=name,
        rollout_rs_threshold=threshold_of(name),
    )
    values = [plain_values(row, name) for row in plain_log_ratios(batch)]
    tokens, of_rows = sum(values, []), [row[0] for row in values if row]
    judged = tokens if name.startswith("token") else of_rows
    numbers = [float(number) for number in threshold_of(name).split("_")]
    is_k1 = name.endswith("k1")
    bounds = (math.log(numbers[0]), math.log(numbers[1])) if is_k1 else (-math.inf, numbers[0])
    floor = bounds[0] if is_k1 else 0.0
    expected = metrics_of(
        *(values, values, judged, judged, bounds), floor=floor, ideal=0.0, fraction="fraction"
    )

    rejected = [[not plain_keeps(value, name) for value in row] for row in values]
    masked = {
        "masked_fraction": fraction_of(sum(rejected, [])),
        "seq_masked_fraction": fraction_of([any(row) for row in rejected if row]),
    }
    names = {f"rollout_rs_{name}_{figure}": value for figure, value in (expected | masked).items()}
    names |= {f"rollout_rs_{figure}": value for figure, value in masked.items()}
    assert metrics == pytest.approx({f"rollout_corr/{key}": value for key, value in names.items()})


def test_metrics_of_chunks_add_up_to_those_of_the_batch(batch: Columns) -> None:
    settings = RolloutCorrectionConfig(
        rollout_is="sequence",
        rollout_is_threshold="0.7_1.4",
        rollout_rs="token_k3,seq_mean_k1",
        rollout_rs_threshold="0.1,0.66_1.4",
        rollout_token_veto_threshold=0.5,
    )
    correction = RolloutCorrection.from_config(settings)
    new, old, mask = batch["log_prob"], batch["old_log_prob"], batch["response_mask"]
    at_once, summed = correction.gauge(), correction.gauge()
    weights, remaining = correction(new, old, mask, at_once)
    chunks = []
    for rows in ([3], [0, 4], [1, 2, 5]):
        weights_of_rows, remaining_of_rows = correction(new[rows], old[rows], mask[rows], summed)
        assert weights_of_rows is not None
        chunks.append((weights_of_rows, remaining_of_rows))

    assert summed.metrics() == pytest.approx(at_once.metrics())
    assert len(at_once.metrics()) == 49
    order = torch.tensor([3, 0, 4, 1, 2, 5])
    torch.testing.assert_close(torch.cat([chunk[0] for chunk in chunks]), weights[order])
    assert torch.equal(torch.cat([chunk[1] for chunk in chunks]), remaining[order])


def test_a_batch_without_tokens_has_no_metrics() -> None:
    nothing = torch.zeros(2, 3)
    settings = {"rollout_is": "token", "rollout_rs": "seq_max_k2", "rollout_rs_threshold": "1"}
    assert corrected(nothing, nothing, nothing, **settings)[2] == {}
