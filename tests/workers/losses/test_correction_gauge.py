"""Metrics of the rollout correction next to plain Python, whole and summed over chunks."""

from __future__ import annotations

import math
import statistics

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
from workers.config import RolloutCorrectionConfig
from workers.losses.correction import RolloutCorrection
from workers.losses.rejection import CRITERIA


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
    correction = RolloutCorrection.of(settings)
    new, old, mask = batch["log_prob"], batch["old_log_prob"], batch["response_mask"]
    whole, summed = correction.gauge(), correction.gauge()
    weights, remaining = correction(new, old, mask, whole)
    chunks = []
    for rows in ([3], [0, 4], [1, 2, 5]):
        weights_of_rows, remaining_of_rows = correction(new[rows], old[rows], mask[rows], summed)
        assert weights_of_rows is not None
        chunks.append((weights_of_rows, remaining_of_rows))

    assert summed.metrics() == pytest.approx(whole.metrics())
    assert len(whole.metrics()) == 49
    order = torch.tensor([3, 0, 4, 1, 2, 5])
    torch.testing.assert_close(torch.cat([chunk[0] for chunk in chunks]), weights[order])
    assert torch.equal(torch.cat([chunk[1] for chunk in chunks]), remaining[order])


def test_a_batch_without_tokens_has_no_metrics() -> None:
    nothing = torch.zeros(2, 3)
    settings = {"rollout_is": "token", "rollout_rs": "seq_max_k2", "rollout_rs_threshold": "1"}
    assert corrected(nothing, nothing, nothing, **settings)[2] == {}
