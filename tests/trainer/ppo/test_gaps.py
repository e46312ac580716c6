"""The driver computes the same from batches with and without gaps in their masks.

A gap has observed tokens: real tokens that the policy did not sample.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from trainer.ppo.config import KLControlConfig, PPOConfig
from trainer.ppo.filters import correct_rollout, without_truncated
from trainer.ppo.metrics import compute_data_metrics
from trainer.ppo.scoring import (
    KLController,
    RunningNorm,
    apply_kl_penalty,
    clamp_scores,
    distill,
    mismatch_metrics,
)
from trainer.ppo.updating import add_chosen_tokens
from trainer.ppo.validation import name_metrics
from verl_like.batch.protocol import DataProto
from verl_like.config_key import replace_keys
from workers.config import PolicyLossConfig, RolloutCorrectionConfig

ROWS, WIDTH = 6, 5
LENGTHS = torch.tensor([5, 3, 1, 0, 4, 2])
PER_TOKEN = (
    *("old_log_probs", "ref_log_prob", "teacher_log_prob", "rollout_log_probs", "entropys"),
    *("values", "returns"),
)
ZERO_OUTSIDE = "token_level_scores", "token_level_rewards", "advantages"
Result = tuple[DataProto, dict[str, float]]


def two_batches(seed: int) -> tuple[DataProto, DataProto]:
    """Return the same tokens and numbers without and with gaps, with garbage in the gaps."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.arange(WIDTH) < LENGTHS[:, None]
    order = torch.rand(ROWS, 2 * WIDTH, generator=generator).argsort(dim=-1).argsort(dim=-1)
    wide = order < LENGTHS[:, None]
    compact, spread = {"response_mask": drawn.long()}, {"response_mask": wide.long()}
    for name in (*PER_TOKEN, *ZERO_OUTSIDE):
        column = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        garbage = torch.randn(ROWS, 2 * WIDTH, generator=generator, dtype=torch.float64)
        if name in ZERO_OUTSIDE:
            column, garbage = column * drawn, torch.zeros_like(garbage)
        if name == "rollout_log_probs":  # observed tokens have none
            garbage = torch.full_like(garbage, torch.nan)
        compact[name] = column
        spread[name] = garbage.masked_scatter_(wide, column[drawn])
    return batch_of(compact, drawn), batch_of(spread, wide.flip(-1).cumsum(-1).flip(-1) > 0)


def batch_of(columns: dict[str, torch.Tensor], real: torch.Tensor) -> DataProto:
    """Return a batch with two prompt tokens; `real` marks the tokens of each response."""
    columns["responses"] = torch.ones_like(columns["response_mask"])
    prompts = torch.ones(ROWS, 2, dtype=torch.int64)
    columns["attention_mask"] = torch.cat([prompts, real.long()], dim=-1)
    columns["sample_index"] = torch.arange(2).repeat(ROWS // 2)
    objects = {
        "uid": [f"{row // 2}-0" for row in range(ROWS)],
        "data_source": ["x"] * ROWS,
        "finish_reason": ["length", *["stop"] * (ROWS - 1)],
    }
    arrays = {name: np.array(values, dtype=object) for name, values in objects.items()}
    return DataProto.from_dict(columns, arrays)


def kl_penalty(per: str) -> Callable[[DataProto], Result]:
    controller = KLController(KLControlConfig(kl_coef=0.1))
    return lambda batch: apply_kl_penalty(batch, controller, kl_penalty_per=per)


def normed_scores(batch: DataProto) -> Result:
    scores, metrics = RunningNorm(["rewards"]).scores(batch)
    batch.batch["token_level_rewards"] = scores
    return batch, metrics


def corrected(**settings: str) -> Callable[[DataProto], Result]:
    correction = RolloutCorrectionConfig(**settings)
    config = replace_keys(PPOConfig(), {"algorithm.rollout_correction": correction})
    return lambda batch: correct_rollout(batch, config, 1)


def chosen(batch: DataProto) -> Result:
    loss = PolicyLossConfig(loss_mode="kl_cov")
    config = replace_keys(PPOConfig(), {"actor_rollout_ref.actor.policy_loss": loss})
    batch = add_chosen_tokens(batch, config, 1)
    return batch, {"chosen": float(batch.batch["chosen_tokens"].sum())}


STAGES: dict[str, Callable[[DataProto], Result]] = {
    "clamp": lambda batch: clamp_scores(batch, 0.5),
    "KL per token": kl_penalty("token"),
    "KL per sequence": kl_penalty("sequence"),
    "norm of scores": normed_scores,
    "norm of advantages": lambda batch: RunningNorm(["advantages"]).advantages(batch),
    "only a teacher": lambda batch: distill(batch, with_teacher(False)),
    "teacher and rewards": lambda batch: distill(batch, with_teacher(True)),
    "weights of tokens": corrected(rollout_is="token"),
    "weights of sequences": corrected(rollout_is="sequence"),
    "rejected tokens": corrected(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0"),
    "rejected sequences": corrected(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0"),
    "without truncated": lambda batch: without_truncated(batch, PPOConfig(), 1),
    "chosen tokens": chosen,
    "metrics": lambda batch: (batch, compute_data_metrics(batch)),
    "mismatch": lambda batch: (batch, mismatch_metrics(batch)),
    "validation": lambda batch: (batch, name_metrics(batch)),
}


OF_ALL_TOKENS = "response_length", "prompt_length", "rollout_corr/gap_from_token"
"""Metrics that count observed tokens too."""


def with_teacher(rewards: bool) -> PPOConfig:
    config = PPOConfig()
    config.distillation.teacher_model.model_path = "teacher"
    config.distillation.use_task_rewards = rewards
    config.distillation.gamma = 0.5
    return config


@pytest.mark.parametrize("stage", STAGES)
def test_gaps_change_neither_sampled_tokens_nor_metrics(stage: str) -> None:
    compact, spread = two_batches(0)
    drawn, wide = (batch.batch["response_mask"].bool() for batch in (compact, spread))
    expected, metrics = STAGES[stage](compact)
    result, result_metrics = STAGES[stage](spread)

    close = {name: value for name, value in metrics.items() if not name.startswith(OF_ALL_TOKENS)}
    assert {name: result_metrics[name] for name in close} == pytest.approx(close, nan_ok=True)
    for name, column in expected.batch.items():
        if column.shape == drawn.shape:
            torch.testing.assert_close(result.batch[name][wide], column[drawn], msg=name)
    assert torch.equal(result.batch["response_mask"].bool() & ~wide, torch.zeros_like(wide))


@pytest.mark.parametrize("stage", STAGES)
def test_observed_tokens_change_no_bit(stage: str) -> None:
    def outcome(garbage: float | None) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        _, batch = two_batches(0)
        drawn = batch.batch["response_mask"].bool()
        for name in PER_TOKEN:
            if garbage is not None:
                batch.batch[name] = batch.batch[name].masked_fill(~drawn, garbage)
        result, metrics = STAGES[stage](batch)
        return {
            name: column[drawn] if column.shape == drawn.shape else column
            for name, column in result.batch.items()
        }, metrics

    columns, metrics = outcome(None)
    for garbage in (torch.nan, -torch.inf, 1e30):
        others, other_metrics = outcome(garbage)
        assert other_metrics == pytest.approx(metrics, rel=0, abs=0, nan_ok=True)
        for name, column in columns.items():
            assert torch.equal(others[name].nan_to_num(7), column.nan_to_num(7)), name


def test_lengths_count_all_real_tokens() -> None:
    _, spread = two_batches(0)
    real = spread.batch["attention_mask"][:, 2:].sum(dim=-1)
    metrics = compute_data_metrics(spread)
    assert metrics["response_length/max"] == real.max() > LENGTHS.max()
    assert metrics["prompt_length/mean"] == 2.0
