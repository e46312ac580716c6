"""Samples that an update does not learn from are counted under the key that left them out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.workers.samples import make_batch
from trainer.ppo.config import PPOConfig
from trainer.ppo.update import samples_of_update
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
    became: Counter[str] = Counter()
    samples_of_update(batch, config, 1, lambda rows: (rows, {}), became)
    return dict(became)


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

    config = PPOConfig()
    config.algorithm.rollout_correction.rollout_rs = "token_k1"
    config.algorithm.rollout_correction.rollout_rs_threshold = "0.5_2.0"
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"].clone()
    batch.batch["rollout_log_probs"][[5, 6]] += 9.0
    found = fates(batch, config)
    assert found == {"trained": 4, "on_failure=skip": 2, "algorithm.rollout_correction": 2}


def test_a_row_that_comes_twice_opens_the_ledger(batch: DataProto) -> None:
    twice = DataProto.concat([batch, batch[:1]])
    assert sum(fates(twice, PPOConfig()).values()) == ROWS + 1
