"""Samples that an update does not learn from are counted under the key that left them out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.workers.samples import make_batch
from trainer.ppo.config import PPOConfig
from trainer.ppo.tokens import TokenLedger, num_tokens
from trainer.ppo.update import samples_of_update
from trainer.report.tokens import TRAINED
from verl_like.batch.protocol import DataProto
from verl_like.errors import LedgerError
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


def tokens_left_out(batch: DataProto, config: PPOConfig) -> tuple[dict[str, int], int]:
    """By reason, and those of the update's batch, of different rows."""
    tokens = TokenLedger()
    tokens.draw(batch)
    tokens.reach_update(num_tokens(batch), None)
    found, _ = samples_of_update(batch, config, 1, lambda rows: (rows, {}), None, tokens)
    assert tokens.metrics(num_tokens(found, once=True))[TRAINED] < tokens.drawn
    return dict(tokens.left_out), num_tokens(found)


def test_tokens_that_leave_the_losses_are_counted_once(batch: DataProto) -> None:
    config, counts = PPOConfig(), batch.batch["response_mask"].sum(dim=-1).tolist()
    assert tokens_left_out(batch, config)[0] == {"on_failure=skip": counts[1] + counts[2]}
    config.algorithm.mask_truncated = True
    assert tokens_left_out(batch, config)[0] == {
        "algorithm.mask_truncated": counts[0] + counts[1],
        "on_failure=skip": counts[2],
    }
    config = PPOConfig()
    config.algorithm.use_pf_ppo = True
    config.algorithm.pf_ppo.reweight_method = "pow"
    left_out, trained = tokens_left_out(batch, config)
    assert left_out["algorithm.use_pf_ppo"] == counts[0] + sum(counts[5:])
    assert trained > sum(counts[3:5]), "rows come more than once"


def test_a_token_that_is_lost_on_its_way_to_the_update_is_told(batch: DataProto) -> None:
    tokens, num = TokenLedger(), num_tokens(batch)
    tokens.draw(batch)
    with pytest.raises(LedgerError, match=f"{num} were drawn, {num - 1} came to the update"):
        tokens.reach_update(num - 1, None)
    tokens.reach_update(num - 1, "by code of the run's own")
    with pytest.raises(LedgerError, match=f"{num} were drawn, {num} are trained on"):
        tokens.metrics(num)
    assert tokens.metrics(num - 1)["training/num_left_out_tokens/by code of the run's own"] == 1


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
