"""Samples that an update does not learn from are counted under the key that left them out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.workers.samples import make_batch
from trainer.ppo.config import PPOConfig
from trainer.ppo.update_samples import count_by_reason, samples_of_update
from verl_like.batch.protocol import DataProto
from workers.rewards.weighted import SKIPPED

ROWS = 8


@pytest.fixture
def batch() -> DataProto:
    samples = make_batch(ROWS)
    samples.non_tensor_batch["uid"] = np.array([f"{row // 2}-0" for row in range(ROWS)], object)
    samples.batch["sample_index"] = torch.arange(2).repeat(ROWS // 2)
    reasons = ["length", "length", *["stop"] * (ROWS - 2)]
    samples.non_tensor_batch["finish_reason"] = np.array(reasons, object)
    samples.non_tensor_batch[SKIPPED] = np.array([0.0, 1.0, 1.0, *[0.0] * (ROWS - 3)])
    scores = torch.zeros_like(samples.batch["response_mask"], dtype=torch.float32)
    scores[3, 0], scores[4, 0] = 1.0, -1.0
    samples.batch["token_level_scores"] = scores
    return samples


def fates(batch: DataProto, config: PPOConfig) -> dict[str, int]:
    learned, _ = samples_of_update(batch, config, 1, balance=lambda rows: (rows, {}))
    return count_by_reason(batch, learned, config)


def test_what_leaves_the_losses_is_counted_once(batch: DataProto) -> None:
    config = PPOConfig()
    assert fates(batch, config) == {"trained": 6, "on_failure=skip": 2}
    config.algorithm.mask_truncated = True
    assert fates(batch, config) == {
        **{"trained": 5, "algorithm.mask_truncated": 2, "on_failure=skip": 1},
    }
    batch.batch["response_mask"][7] = 0
    assert fates(batch, config)["no token"] == 1


def test_samples_that_are_not_drawn_or_rejected_are_counted_too(batch: DataProto) -> None:
    config = PPOConfig()
    config.algorithm.use_pf_ppo = True
    config.algorithm.pf_ppo.reweight_method = "pow"
    found = fates(batch, config)
    assert found == {"trained": 2, "on_failure=skip": 2, "algorithm.use_pf_ppo": 4}

    rejected = batch.select()
    rejected.batch["response_mask"] = rejected.batch["response_mask"].clone()
    rejected.batch["response_mask"][[5, 6]] = 0
    assert count_by_reason(batch, rejected, PPOConfig()) == {
        **{"trained": 6, "algorithm.rollout_correction": 2},
    }


def test_a_row_that_comes_twice_opens_the_ledger(batch: DataProto) -> None:
    twice = DataProto.concat([batch, batch[:1]])
    assert sum(count_by_reason(batch, twice, PPOConfig()).values()) == ROWS + 1
