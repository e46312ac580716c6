"""Samples drawn by score for an update, and tokens chosen for whole mini-batches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from trainer import load_config
from trainer.ppo.config import PolicyFiltrationConfig, PPOConfig
from trainer.ppo.filters import draw_rows, filtration_weights, resample_by_score
from trainer.ppo.updating import add_chosen_tokens
from verl_like.batch.protocol import DataProto
from verl_like.config_key import replace_keys
from workers.config import PolicyLossConfig
from workers.losses.registry import POLICY_LOSSES, traits_of

ROWS, WIDTH = 12, 6
NEEDED = ("data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.backend=local")


def filtration(**settings: Any) -> PPOConfig:
    return replace_keys(
        PPOConfig(), {"algorithm.pf_ppo": PolicyFiltrationConfig(**settings), "trainer.seed": 1}
    )


def config_of(loss_mode: str, num_samples: int = ROWS, **arguments: float) -> PPOConfig:
    """Return a configuration with the seed 1, and with mini-batches of `num_samples`."""
    actor = {
        "policy_loss": PolicyLossConfig(loss_mode=loss_mode, args=arguments),
        "ppo_mini_batch_size": num_samples,
    }
    return replace_keys(
        PPOConfig(), {f"actor_rollout_ref.actor.{key}": actor[key] for key in actor}
    )


@pytest.fixture
def batch() -> DataProto:
    torch.manual_seed(0)
    mask = (torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (ROWS, 1))).long()
    scores = torch.zeros(ROWS, WIDTH)
    scores[:, 0] = torch.tensor([0.0, 1.0, 2.0, -2.0] * 3)
    return DataProto.from_dict(
        {
            "response_mask": mask,
            "token_level_scores": scores,
            "old_log_probs": 3 * torch.randn(ROWS, WIDTH),
            "advantages": 3 * torch.randn(ROWS, WIDTH) * mask,
            "sample_index": torch.arange(2).repeat(ROWS // 2),
        },
        {"uid": np.array([f"{row // 2}-0" for row in range(ROWS)], dtype=object)},
    )


def rows_of(batch: DataProto) -> list[tuple[str, int]]:
    index = batch.batch["sample_index"].tolist()
    return list(zip(batch.non_tensor_batch["uid"].tolist(), index, strict=True))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("pow", [0.0, 1.0, 8.0, 8.0]),
        ("max_min", [0.0, 0.0, 1.0, 1.0]),
        ("max_random", [0.1, 0.1, 0.4, 0.1]),
    ],
)
def test_weights_follow_the_paper(method: str, expected: list[float]) -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, -2.0])
    assert filtration_weights(scores, method, weight_pow=3).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.999999])
def test_rows_are_drawn_in_proportion_to_their_weights(offset: float) -> None:
    weights = torch.tensor([0.0, 1.0, 5.0, 0.0, 3.0, 3.0, 0.0], dtype=torch.float64)
    drawn = draw_rows(weights, offset)
    counts = Counter(drawn.tolist())
    assert len(drawn) == len(weights)
    for row, weight in enumerate(weights.tolist()):
        assert abs(counts[row] - len(weights) * weight / 12) < 1


@pytest.mark.parametrize("weights", [[0.0] * 5, [0.3] * 5, [7e-9] * 5])
def test_equal_weights_draw_every_row_once(weights: list[float]) -> None:
    for offset in (0.0, 0.5, 0.99):
        assert draw_rows(torch.tensor(weights).double(), offset).tolist() == [0, 1, 2, 3, 4]


def test_a_draw_depends_on_the_step_but_not_on_the_row_order(batch: DataProto) -> None:
    config = filtration(weight_pow=1.0)
    drawn = [rows_of(resample_by_score(batch, config, step)[0]) for step in range(1, 9)]
    assert rows_of(resample_by_score(batch, config, 1)[0]) == drawn[0]
    assert len(set(map(tuple, drawn))) > 1

    shuffled = batch[torch.randperm(ROWS)]
    assert rows_of(resample_by_score(shuffled, config, 1)[0]) == drawn[0]


def test_max_min_keeps_only_the_highest_and_lowest_scores(batch: DataProto) -> None:
    config = filtration(reweight_method="max_min")
    drawn, metrics = resample_by_score(batch, config, 1)
    assert len(drawn) == ROWS
    assert set(drawn.batch["token_level_scores"][:, 0].tolist()) == {2.0, -2.0}
    assert metrics == {"pf_ppo/kept_ratio": 0.5, "pf_ppo/most_copies": 2.0}


def test_kl_cov_chooses_the_highest_covariances(batch: DataProto) -> None:
    chosen = add_chosen_tokens(batch, config_of("kl_cov", ROWS // 3), 1).batch["chosen_tokens"]
    for number in range(3):
        rows = torch.arange(number, ROWS, 3)
        inside = batch.batch["response_mask"][rows].bool()
        advantages = batch.batch["advantages"][rows].double()
        old = batch.batch["old_log_probs"][rows].double()
        product = (advantages - advantages[inside].mean()) * (old - old[inside].mean())
        best = product.masked_fill(~inside, -torch.inf) == product[inside].max()
        assert torch.equal(chosen[rows], best)  # 2 in 10000, of so few tokens, is one token


def test_the_configured_share_of_tokens_is_chosen(batch: DataProto) -> None:
    num_tokens = int(batch.batch["response_mask"].sum())
    half = add_chosen_tokens(batch, config_of("kl_cov", kl_cov_ratio=0.5), 1)
    assert int(half.batch["chosen_tokens"].sum()) == num_tokens // 2
    every = config_of("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=-99.0, clip_cov_ub=99.0)
    chosen = add_chosen_tokens(batch, every, 1).batch["chosen_tokens"]
    assert int(chosen.sum()) == num_tokens


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov"])
def test_the_order_of_rows_changes_no_choice(batch: DataProto, loss_mode: str) -> None:
    before = add_chosen_tokens(batch, config_of(loss_mode, ROWS // 3), 1)
    # balancing moves rows between ranks, but only within their mini-batch
    order = torch.arange(ROWS).view(-1, 3).flip(0).flatten()
    after = add_chosen_tokens(batch[order], config_of(loss_mode, ROWS // 3), 1)
    assert torch.equal(after.batch["chosen_tokens"], before.batch["chosen_tokens"][order])
    assert before.batch["chosen_tokens"].any()


def test_clip_cov_chooses_other_tokens_in_other_steps(batch: DataProto) -> None:
    batch.batch["response_mask"].fill_(1)
    config = config_of("clip_cov")
    draws = [add_chosen_tokens(batch, config, step).batch["chosen_tokens"] for step in range(6)]
    assert not all(torch.equal(draw, draws[0]) for draw in draws)


def test_a_bypass_chooses_tokens_by_the_rollouts_log_probs(batch: DataProto) -> None:
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"
    expected = add_chosen_tokens(batch, load_config([*NEEDED, loss]), 1)
    batch.rename("old_log_probs", "rollout_log_probs")
    config = load_config([*NEEDED, loss, "correction=bypass_ppo_clip"])
    chosen = add_chosen_tokens(batch, config, 1).batch["chosen_tokens"]
    assert torch.equal(chosen, expected.batch["chosen_tokens"])


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_no_token_outside_the_mask_is_chosen(name: str) -> None:
    choose = traits_of(POLICY_LOSSES[name]).choose_tokens
    assert choose is not None
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    old, advantages = torch.full((2, 3), torch.nan), torch.full((2, 3), torch.nan)
    old[mask == 1], advantages[mask == 1] = torch.tensor([-3.0, -1.0]), torch.tensor([-1.5, 1.5])
    assert not (choose(old, advantages, mask) & (mask == 0)).any()
    assert not choose(old, advantages, torch.zeros_like(mask)).any()
