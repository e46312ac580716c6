"""The actor with `algorithm.rollout_correction`: weights from the driver, and the bypass."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.samples import learned, make_batch, started, tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.errors import MissingColumnError
from workers.config import PolicyLossConfig, RolloutCorrectionConfig
from workers.losses.correction import RolloutCorrection
from workers.losses.policy import compute_policy_loss_reinforce
from workers.roles.actor import ActorWorker

REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}


def updated(
    tiny_dir: Path, batch: DataProto, correction: dict[str, Any] | None = None, **actor: Any
) -> dict[str, float]:
    """Return the metrics of one update of a fresh actor."""
    config = tiny_config(tiny_dir, **{"ppo_mini_batch_size": 4, **actor})
    config.algorithm.rollout_correction = RolloutCorrectionConfig(**(correction or {}))
    return learned(started(ActorWorker, config, 1).update_actor(batch))


@pytest.fixture
def batch() -> DataProto:
    """The rollout's log-probs are close to the policy's, about 1 in 50 per token."""
    batch = make_batch(4)
    noise = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    batch.batch["rollout_log_probs"] = 0.1 * noise - math.log(50)
    return batch


def test_the_driver_s_weights_scale_the_loss(tiny_dir: Path, batch: DataProto) -> None:
    plain = updated(tiny_dir, batch)
    batch.batch["rollout_is_weights"] = torch.full((4, 5), 0.5)
    weighed = updated(tiny_dir, batch, {"rollout_is": "token"})
    for name in ("actor/grad_norm", "actor/pg_loss"):
        assert weighed[name] == pytest.approx(plain[name] / 2, rel=1e-4)


def test_missing_weights_name_their_writer(tiny_dir: Path, batch: DataProto) -> None:
    with pytest.raises(MissingColumnError, match="'rollout_is_weights'.*correct_rollout"):
        updated(tiny_dir, batch, {"rollout_is": "token"})


@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_a_bypass_uses_the_rollout_s_log_probs_as_old_ones(
    tiny_dir: Path, batch: DataProto, loss: str
) -> None:
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    chosen = {"policy_loss": PolicyLossConfig(loss_mode=loss)}
    expected = updated(tiny_dir, batch, **chosen)
    del batch.batch["old_log_probs"]
    metrics = updated(tiny_dir, batch, {"bypass_mode": True}, **chosen)
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["rollout_corr/k3_kl"] > 0, "the gap is still measured"


def test_a_bypass_uses_the_truncated_log_probs_of_the_rollout(
    tiny_dir: Path, batch: DataProto
) -> None:
    drawn = batch.batch["rollout_log_probs"].clone()
    expected = updated(tiny_dir, batch, {"bypass_mode": True})
    batch.batch["rollout_truncated_log_probs"] = drawn
    batch.batch["rollout_log_probs"] = drawn - 1.0
    metrics = updated(tiny_dir, batch, {"bypass_mode": True})
    assert metrics["actor/pg_loss"] == expected["actor/pg_loss"]


def test_a_reinforce_bypass_scales_by_the_ratio_of_the_policy_in_training(
    tiny_dir: Path, batch: DataProto
) -> None:
    plain = updated(tiny_dir, batch, policy_loss=PolicyLossConfig(loss_mode="reinforce"))
    log_probs = started(ActorWorker, tiny_config(tiny_dir), 1).compute_log_prob(batch)[0]
    batch.batch["rollout_log_probs"] = log_probs.batch["old_log_probs"] - math.log(1.5)
    metrics = updated(tiny_dir, batch, {**REINFORCE, "rollout_is": "token"})
    assert metrics["actor/grad_norm"] == pytest.approx(1.5 * plain["actor/grad_norm"], rel=1e-4)
    for figure, value in (("mean", 1.5), ("max", 1.5), ("seq_std", 0.0), ("eff_sample_size", 1.0)):
        name = f"rollout_corr/rollout_is_{figure}"
        assert metrics[name] == pytest.approx(value, abs=1e-4)


def test_samples_that_a_bypass_rejects_stay_in_the_denominators(
    tiny_dir: Path, batch: DataProto
) -> None:
    rejecting = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
    batch.batch["rollout_log_probs"][:2] -= 3.0
    metrics = updated(tiny_dir, batch, {**REINFORCE, **rejecting})
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.5

    batch.batch["advantages"][:2] = 0.0
    expected = updated(tiny_dir, batch, policy_loss=PolicyLossConfig(loss_mode="reinforce"))
    for name in ("actor/grad_norm", "actor/pg_loss"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_bypass_that_rejects_all_samples_has_a_gradient_of_zero(
    tiny_dir: Path, batch: DataProto
) -> None:
    batch.batch["rollout_log_probs"] -= 5.0
    metrics = updated(
        tiny_dir, batch, {**REINFORCE, "rollout_rs": "seq_max_k3", "rollout_rs_threshold": "1"}
    )
    assert metrics["actor/grad_norm"] == metrics["actor/pg_loss"] == 0.0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_of_a_reinforce_bypass_is_of_the_expected_advantage(level: str) -> None:
    """Its weights have no gradient of their own: w A grad(log p) = grad(w) A, by differences."""
    generator = torch.Generator().manual_seed(0)
    log_probs, behavior = (
        0.3 * torch.randn(3, 4, generator=generator, dtype=torch.float64) - 1 for _ in range(2)
    )
    advantages = torch.randn(3, 1, generator=generator, dtype=torch.float64).expand(3, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]])
    settings = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold="1000")
    correction = RolloutCorrection.from_config(settings)

    leaf = log_probs.clone().requires_grad_()
    weights, remaining = correction(leaf, behavior, mask, correction.gauge())
    loss, _ = compute_policy_loss_reinforce(
        behavior, leaf, advantages, remaining, "token-sum", None, weights
    )
    loss.backward()

    def expected_advantage(log_probs: torch.Tensor) -> torch.Tensor:
        log_ratio = (log_probs - behavior) * mask
        if level == "token":
            return -(log_ratio.exp() * advantages * mask).sum()
        return -(log_ratio.sum(-1).exp() * advantages[:, 0] * mask.any(-1)).sum()

    for row, column in mask.nonzero().tolist():
        step = torch.zeros_like(log_probs)
        step[row, column] = 1e-5
        rise = expected_advantage(log_probs + step) - expected_advantage(log_probs - step)
        assert leaf.grad[row, column].item() == pytest.approx(rise.item() / 2e-5, rel=1e-6)
    assert (leaf.grad[mask == 0] == 0).all()
