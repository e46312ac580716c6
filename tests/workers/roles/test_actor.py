from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.workers.samples import make_batch, started, tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError, MissingColumnError
from workers.config import PolicyLossConfig, RolloutConfig
from workers.roles.actor import ActorWorker, log_prob_temperature

METRICS = {
    "pg_loss",
    "pg_clipfrac",
    "pg_clipfrac_lower",
    "ppo_kl",
    "grad_norm",
    "lr",
    "skipped_steps",
    "weights_changed_fraction",
}


@pytest.fixture
def batch() -> DataProto:
    return make_batch(8)


def actor_of(tiny_dir: Path, **actor: Any) -> ActorWorker:
    return started(ActorWorker, tiny_config(tiny_dir, **{"ppo_mini_batch_size": 8, **actor}), 10)


def test_an_update_reports_plain_floats_under_verl_s_names(
    tiny_dir: Path, batch: DataProto
) -> None:
    metrics = actor_of(tiny_dir).update_actor(batch)
    assert metrics.keys() == {*(f"actor/{name}" for name in METRICS), "perf/cpu_memory_used_gb"}
    assert all(type(value) is float for value in metrics.values())


def test_entropy_and_kl_are_reported_when_they_are_in_the_loss(
    tiny_dir: Path, batch: DataProto
) -> None:
    actor = actor_of(tiny_dir, entropy_coeff=0.01, use_kl_loss=True)
    metrics = actor.update_actor(batch)
    assert metrics["actor/entropy"] == pytest.approx(math.log(50), abs=0.05)
    assert metrics["actor/kl_loss"] > 0


def test_an_update_without_old_log_probs_names_their_writer(
    tiny_dir: Path, batch: DataProto
) -> None:
    del batch.batch["old_log_probs"]
    with pytest.raises(MissingColumnError, match="'old_log_probs'.*actor.compute_log_prob"):
        actor_of(tiny_dir).update_actor(batch)


def test_an_on_policy_update_computes_old_log_probs_itself(
    tiny_dir: Path, batch: DataProto
) -> None:
    # one pass for all: the last bits of log-probs depend on the number of tokens in a pass
    separate, on_policy = (actor_of(tiny_dir, ppo_micro_batch_size_per_gpu=8) for _ in range(2))
    batch.batch["old_log_probs"] = separate.compute_log_prob(batch)[0].batch["old_log_probs"]
    separate.update_actor(batch)
    del batch.batch["old_log_probs"]
    batch.meta_info["on_policy"] = True
    metrics = on_policy.update_actor(batch)
    assert metrics["actor/ppo_kl"] == 0.0
    assert on_policy.weights_checksum() == separate.weights_checksum()


@pytest.mark.parametrize("more", [{"ppo_epochs": 2}, {"ppo_mini_batch_size": 4}])
def test_an_on_policy_update_of_several_optimizer_steps_is_rejected(
    tiny_dir: Path, batch: DataProto, more: dict[str, int]
) -> None:
    batch.meta_info["on_policy"] = True
    with pytest.raises(BatchError, match=r"on_policy.*more than one optimizer step for 8 samples"):
        actor_of(tiny_dir, **more).update_actor(batch)


def test_the_mini_batch_size_counts_prompts_not_samples(tiny_dir: Path, batch: DataProto) -> None:
    config = tiny_config(tiny_dir, ppo_mini_batch_size=2)
    config.actor_rollout_ref.rollout.n = 4
    actor = started(ActorWorker, config, 10)
    steps = []
    actor.engine.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    actor.update_actor(batch)
    assert len(steps) == 1


def test_greedy_rollouts_have_log_probs_of_temperature_1() -> None:
    assert log_prob_temperature(RolloutConfig(temperature=0.7)) == 0.7
    assert log_prob_temperature(RolloutConfig(temperature=0.7, do_sample=False)) == 1.0
    assert log_prob_temperature(RolloutConfig(temperature=0.0)) == 1.0


def test_the_loss_mode_chooses_the_policy_loss(tiny_dir: Path) -> None:
    plain, other = (
        gradient_norm(tiny_dir, policy_loss=PolicyLossConfig(loss_mode=mode))
        for mode in ("vanilla", "gspo")
    )
    assert other > 0
    assert other != pytest.approx(plain, rel=1e-3)


def test_a_scale_factor_divides_the_summed_loss(tiny_dir: Path) -> None:
    norms = [
        gradient_norm(tiny_dir, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=f)
        for f in (None, 5, 10)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[2] == pytest.approx(norms[1] / 2, rel=1e-4)


def gradient_norm(tiny_dir: Path, **actor: Any) -> float:
    worker = started(ActorWorker, tiny_config(tiny_dir, ppo_mini_batch_size=4, **actor), 1)
    return worker.update_actor(make_batch(4))["actor/grad_norm"]


def test_sums_of_squared_probabilities_are_computed_on_demand(
    tiny_dir: Path, batch: DataProto
) -> None:
    actor = actor_of(tiny_dir)
    assert "sum_pi_squared" not in actor.compute_log_prob(batch)[0].columns
    batch.meta_info["sum_pi_squared"] = True
    columns = actor.compute_log_prob(batch)[0].batch
    inside = batch.batch["response_mask"].bool()
    squares, chances = columns["sum_pi_squared"], columns["old_log_probs"].exp()
    assert (squares[~inside] == 0).all()
    assert (squares[inside] >= chances[inside].square()).all()
    # an entropy of H is at least the log of one over the sum of squares (Renyi)
    assert (columns["entropys"][inside] >= -squares[inside].log() - 1e-5).all()
