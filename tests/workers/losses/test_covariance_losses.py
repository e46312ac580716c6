"""Clip-Cov and KL-Cov, which compare tokens with each other, next to loops over all tokens."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

from tests.workers.losses.plain_python import CONFIG, Columns, Rows, aggregate, tokens_of
from tests.workers.losses.twins import clipped_surrogate
from workers.config import LOSS_AGG_MODES
from workers.losses.policy import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from workers.losses.registry import PolicyLoss, traits_of

NAMES = ("old_log_prob", "log_prob", "advantages")
Token = tuple[int, float, float, float, float]
"""(row, old log-prob, log-prob, advantage, covariance)."""
WIDE = {"clip_cov_lb": 0.1, "clip_cov_ub": 1.2}


def inputs_of(batch: Columns) -> Columns:
    return {name: batch[name] for name in (*NAMES, "response_mask")}


def tokens_with_covariance(batch: Columns) -> list[Token]:
    """Return (row, old log-prob, log-prob, advantage, covariance) of every token in the mask."""
    columns = [tokens_of(batch[name], batch["response_mask"]) for name in NAMES]
    tokens = [
        (row, *token)
        for row, of_row in enumerate(zip(*columns, strict=True))
        for token in zip(*of_row, strict=True)
    ]
    mean_old = statistics.mean(old for _, old, _, _ in tokens)
    mean_advantage = statistics.mean(advantage for *_, advantage in tokens)
    return [
        (row, old, new, advantage, (advantage - mean_advantage) * (old - mean_old))
        for row, old, new, advantage in tokens
    ]


def by_row(tokens: list[Token], losses: list[float]) -> Rows:
    rows: Rows = [[] for _ in range(6)]
    for (row, *_), loss in zip(tokens, losses, strict=True):
        rows[row].append(loss)
    return rows


def clip_cov_candidates(tokens: list[Token], lowest: float, highest: float) -> list[int]:
    return [place for place, token in enumerate(tokens) if lowest < token[-1] < highest]


def chosen_by(policy_loss: PolicyLoss, batch: Columns, **settings: float) -> Columns:
    choose = traits_of(policy_loss).choose_tokens
    assert choose is not None, "it treats all tokens alike"
    inputs = inputs_of(batch)
    inputs.pop("log_prob")
    return {"chosen_tokens": choose(**inputs, **settings)}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_clip_cov_drops_every_candidate_at_ratio_one(batch: Columns, mode: str) -> None:
    tokens = tokens_with_covariance(batch)
    candidates = clip_cov_candidates(tokens, 0.1, 1.2)
    assert 2 <= len(candidates) < len(tokens)
    losses = []
    for place, (_, old, new, advantage, _) in enumerate(tokens):
        loss = clipped_surrogate(math.exp(new - old), advantage, 0.2, 0.3)
        losses.append(0.0 if place in candidates else loss)
    loss, metrics = compute_policy_loss_clip_cov(
        **inputs_of(batch),
        **chosen_by(compute_policy_loss_clip_cov, batch, clip_cov_ratio=1.0, **WIDE),
        loss_agg_mode=mode,
        config=CONFIG,
    )
    assert loss.item() == pytest.approx(aggregate(by_row(tokens, losses), mode))
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(len(candidates) / len(tokens))


@pytest.mark.parametrize("ratio", [0.0, 2.2 / 15])
def test_clip_cov_drops_its_ratio_of_candidates_and_at_least_one(
    batch: Columns, ratio: float
) -> None:
    tokens = tokens_with_covariance(batch)
    count = max(int(ratio * len(tokens)), 1)
    whole = [
        clipped_surrogate(math.exp(new - old), advantage, 0.2, 0.3)
        for _, old, new, advantage, _ in tokens
    ]
    possible = []
    for dropped in itertools.combinations(clip_cov_candidates(tokens, 0.1, 1.2), count):
        possible.append(sum(whole) - sum(whole[place] for place in dropped))

    torch.manual_seed(0)
    drawn = set()
    for _ in range(20):
        loss, metrics = compute_policy_loss_clip_cov(
            **inputs_of(batch),
            **chosen_by(compute_policy_loss_clip_cov, batch, clip_cov_ratio=ratio, **WIDE),
            loss_agg_mode="token-sum",
            config=CONFIG,
        )
        assert any(loss.item() == pytest.approx(value) for value in possible)
        assert metrics["actor/pg_clipfrac"].item() == pytest.approx(count / len(tokens))
        drawn.add(round(loss.item(), 9))
    assert len(drawn) > 1


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_kl_cov_adds_the_kl_of_the_tokens_of_highest_covariance(
    batch: Columns, mode: str, ratio: float
) -> None:
    tokens = tokens_with_covariance(batch)
    count = max(int(ratio * len(tokens)), 1)
    least = sorted(covariance for *_, covariance in tokens)[-count]
    losses = []
    for _, old, new, advantage, covariance in tokens:
        penalty = abs(new - old) if covariance >= least else 0.0
        losses.append(-advantage * math.exp(new - old) + penalty)
    loss, metrics = compute_policy_loss_kl_cov(
        **inputs_of(batch),
        **chosen_by(compute_policy_loss_kl_cov, batch, kl_cov_ratio=ratio),
        loss_agg_mode=mode,
        config=CONFIG,
    )
    assert loss.item() == pytest.approx(aggregate(by_row(tokens, losses), mode))
    moves = [abs(new - old) for _, old, new, *_ in tokens]  # absolute, as verl's kl_cov has it
    assert metrics["actor/ppo_kl"].item() == pytest.approx(sum(moves) / len(moves))
    assert metrics["actor/kl_cov_frac"].item() == pytest.approx(count / len(tokens))


@pytest.mark.parametrize("policy_loss", [compute_policy_loss_clip_cov, compute_policy_loss_kl_cov])
def test_the_rollout_correction_weighs_every_token(batch: Columns, policy_loss: PolicyLoss) -> None:
    inputs = inputs_of(batch)
    torch.manual_seed(0)
    plain, _ = policy_loss(**inputs, loss_agg_mode="token-mean", config=CONFIG)
    torch.manual_seed(0)
    twice = torch.full_like(batch["weights"], 2.0)
    weighted, _ = policy_loss(
        **inputs, loss_agg_mode="token-mean", config=CONFIG, rollout_is_weights=twice
    )
    torch.testing.assert_close(weighted, 2 * plain)
