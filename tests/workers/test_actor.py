import math

import pytest
from samples import make_batch, started, tiny_config

from verl_like.errors import MissingColumnError
from workers.actor import ActorWorker, log_prob_temperature
from workers.config import RolloutConfig

METRICS = {"pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "grad_norm", "lr", "skipped_steps"}


@pytest.fixture
def batch():
    return make_batch(8)


def actor_of(tiny_dir, **actor):
    return started(ActorWorker, tiny_config(tiny_dir, **{"ppo_mini_batch_size": 8, **actor}), 10)


def test_an_update_reports_plain_floats_under_verl_s_names(tiny_dir, batch):
    metrics = actor_of(tiny_dir).update_actor(batch).meta_info["metrics"]
    assert metrics.keys() == {f"actor/{name}" for name in METRICS}
    assert all(type(value) is float for value in metrics.values())


def test_entropy_and_kl_are_reported_when_they_are_in_the_loss(tiny_dir, batch):
    actor = actor_of(tiny_dir, entropy_coeff=0.01, use_kl_loss=True)
    metrics = actor.update_actor(batch).meta_info["metrics"]
    assert metrics["actor/entropy"] == pytest.approx(math.log(50), abs=0.05)
    assert metrics["actor/kl_loss"] > 0


def test_updates_raise_the_probability_of_tokens_with_positive_advantage(tiny_dir, batch):
    actor = actor_of(tiny_dir, ppo_epochs=4)
    before = actor.compute_log_prob(batch).batch["old_log_probs"]
    batch.batch["old_log_probs"] = before
    actor.update_actor(batch)
    moved = actor.compute_log_prob(batch).batch["old_log_probs"] - before
    inside = batch.batch["response_mask"].bool()
    agrees = (moved * batch.batch["advantages"])[inside] > 0
    assert agrees.float().mean() > 0.8


def test_the_first_step_sees_no_divergence_from_its_own_log_probs(tiny_dir, batch):
    actor = actor_of(tiny_dir)
    batch.batch["old_log_probs"] = actor.compute_log_prob(batch).batch["old_log_probs"]
    metrics = actor.update_actor(batch).meta_info["metrics"]
    assert abs(metrics["actor/ppo_kl"]) < 1e-6
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_the_kl_loss_needs_the_reference_s_column(tiny_dir, batch):
    actor = actor_of(tiny_dir, use_kl_loss=True)
    batch.pop(batch_keys=["ref_log_prob"])
    with pytest.raises(MissingColumnError, match="is the ref role configured"):
        actor.update_actor(batch)


def test_a_mini_batch_counts_prompts_each_with_n_samples(tiny_dir, batch):
    config = tiny_config(tiny_dir, ppo_mini_batch_size=2)
    config.actor_rollout_ref.rollout.n = 4
    actor = started(ActorWorker, config, 10)
    steps = []
    actor.engine.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    actor.update_actor(batch)
    assert len(steps) == 1


def test_greedy_rollouts_count_as_temperature_one():
    assert log_prob_temperature(RolloutConfig(temperature=0.7)) == 0.7
    assert log_prob_temperature(RolloutConfig(temperature=0.7, do_sample=False)) == 1.0
    assert log_prob_temperature(RolloutConfig(temperature=0.0)) == 1.0
