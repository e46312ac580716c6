"""Running normalization against the moments of all numbers."""

from __future__ import annotations

import statistics

import pytest
import torch

from trainer.ppo.scoring import RunningMoments, RunningNorm
from verl_like.batch.protocol import DataProto

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])


def batch_of(seed: int) -> DataProto:
    torch.manual_seed(seed)
    scores = torch.randn(4, 4, dtype=torch.float64) * MASK + 3 * MASK
    advantages = (torch.randn(4, 4, dtype=torch.float64) + 1) * MASK
    columns = {"token_level_scores": scores, "advantages": advantages, "response_mask": MASK}
    return DataProto.from_dict(columns)


def test_moments_of_chunks_equal_the_moments_of_the_whole() -> None:
    numbers = torch.randn(40, dtype=torch.float64).add(1e6).tolist()
    moments = RunningMoments()
    for chunk in (numbers[:1], numbers[1:1], numbers[1:17], numbers[17:]):
        mean = statistics.fmean(chunk) if chunk else 0.0
        moments.add(len(chunk), mean, sum((number - mean) ** 2 for number in chunk))
    assert moments.count == 40
    assert moments.mean == pytest.approx(statistics.mean(numbers), rel=1e-12)
    assert moments.std == pytest.approx(statistics.stdev(numbers), rel=1e-9)


def test_scores_are_normalized_by_all_samples_so_far() -> None:
    norm, seen = RunningNorm(["rewards"]), []
    for seed in range(3):
        batch = batch_of(seed)
        before = batch.batch["token_level_scores"].clone()
        sums = before.sum(-1)
        seen += [sums[row].item() for row in (0, 1, 3)]  # row 2 has no response
        mean, std = statistics.mean(seen), statistics.stdev(seen)

        scores, metrics = norm.scores(batch)
        torch.testing.assert_close(scores.sum(-1)[[0, 1, 3]], (sums[[0, 1, 3]] - mean) / std)
        torch.testing.assert_close(scores[0, :2], before[0, :2] / std)
        assert (scores[2] == 0).all()
        assert torch.equal(batch.batch["token_level_scores"], before)
        assert metrics["critic/rewards/running_mean"] == pytest.approx(mean)
        assert metrics["critic/rewards/running_std"] == pytest.approx(std)


def test_advantages_are_normalized_by_all_tokens_so_far() -> None:
    norm, seen = RunningNorm(["advantages"]), []
    for seed in range(3):
        batch = batch_of(seed)
        before = batch.batch["advantages"].clone()
        seen += before[MASK.bool()].tolist()
        expected = (before - statistics.mean(seen)) / statistics.stdev(seen) * MASK
        batch, _ = norm.advantages(batch)
        torch.testing.assert_close(batch.batch["advantages"], expected)


def test_equal_scores_become_zero_and_stay_finite() -> None:
    batch, norm = batch_of(0), RunningNorm(["rewards"])
    batch.batch["token_level_scores"] = torch.tensor([[0.0, 0.0, 0.1, 0.0]] * 4)
    scores, _ = norm.scores(batch)
    assert scores.sum(-1)[[0, 1, 3]].abs().max() < 1e-7
    assert scores.isfinite().all()
