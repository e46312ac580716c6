"""The printed graph of a step follows from the configuration: dependencies and overlap."""

from __future__ import annotations

from trainer import load_config
from trainer.async_training.recipe import ASYNC
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe, edges, overlaps, step_nodes
from trainer.ppo.score import update_can_compute_old_log_probs
from trainer.ppo.sizes import batch_table

NEEDED = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=model")


def load(*overrides: str) -> PPOConfig:
    return load_config([*NEEDED, *overrides])


SPLIT_PPO = ("placement=split", "trainer.n_gpus_per_node=2", "algorithm.use_kl_in_reward=true")
DEVICES = "trainer.n_gpus_per_node=3"
GRPO_OF_ONE_STEP = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1024",
)


def test_a_call_waits_for_the_writers_of_what_it_reads() -> None:
    after = edges(step_nodes(load(*SPLIT_PPO)))
    assert after["critic.compute_values"] == ["rollout.generate_sequences", "prompts"]
    assert after["token rewards"] == [
        "rewards",
        "actor.compute_log_prob",
        "ref.compute_ref_log_prob",
    ]
    assert after["gae"] == ["token rewards", "critic.compute_values", "rollout.generate_sequences"]
    assert "gae" in after["critic.update_critic"]
    assert "gae" in after["actor.update_actor"]
    assert "critic.update_critic" not in after["actor.update_actor"]


def test_the_description_lists_chains_of_concurrent_calls() -> None:
    readings = "actor.compute_log_prob, then ref.compute_ref_log_prob"
    assert describe(load(*SPLIT_PPO)).splitlines()[-6:] == [
        "Concurrent:",
        "  score: rewards",
        f"    ‖ {readings}",
        "    ‖ critic.compute_values",
        "  update: critic.update_critic",
        "    ‖ actor.update_actor",
    ]
    colocated = describe(load("placement=colocate", "algorithm.use_kl_in_reward=true"))
    assert colocated.splitlines()[-3:] == [
        "Concurrent:",
        "  score: rewards",
        f"    ‖ {readings}, then critic.compute_values",
    ]


def test_rewards_wait_for_the_reward_model() -> None:
    reward_model = ("reward.model.enable=true", "reward.model.path=judge")
    judge = "reward_model.compute_rm_score"
    config = load(*SPLIT_PPO, *reward_model)
    assert f"  score: {judge}, then critic.compute_values\n" in describe(config)
    assert f"    ‖ rewards (after {judge})\n" in describe(config)
    assert f"‖ rewards (after {judge}) ‖" in overlaps(config)
    assert f"({judge}, then critic.compute_values)" in overlaps(config)


def test_pools_in_the_drivers_process_are_sequential() -> None:
    readings = "actor.compute_log_prob, then ref.compute_ref_log_prob"
    settings = (*SPLIT_PPO, "trainer.backend=local")
    assert describe(load(*settings)).splitlines()[-6:] == [
        "Concurrent:",
        "  score: rewards",
        f"    ‖ {readings}, then critic.compute_values",
        "Sequential, in the driver's process:",
        f"  score: {readings}, then critic.compute_values",
        "  update: critic.update_critic, then actor.update_actor",
    ]
    in_processes = describe(load(*settings, "trainer.n_gpus_per_node=4"))
    update = "  update: critic.update_critic\n    ‖ actor.update_actor"
    assert update in in_processes
    one_of_two = describe(load(*settings, "resource_pool_spec.critic_pool=[2]", DEVICES))
    assert update in one_of_two, "it is called first"
    assert f"in the driver's process:\n  score: {readings}, then critic" in one_of_two


def test_a_single_update_per_step_computes_the_old_log_probs() -> None:
    assert update_can_compute_old_log_probs(load(*GRPO_OF_ONE_STEP))
    for setting in (
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=512",
        "algorithm.use_kl_in_reward=true",
    ):
        assert not update_can_compute_old_log_probs(load(*GRPO_OF_ONE_STEP, setting))


def test_the_size_table_lists_old_log_probs_only_with_a_separate_pass() -> None:
    bypass = "correction=bypass_ppo_clip_geo_rs"
    for settings in (GRPO_OF_ONE_STEP, (*GRPO_OF_ONE_STEP, bypass)):
        assert "old log-probs" not in batch_table(load(*settings))
    config = load_config([*NEEDED, *GRPO_OF_ONE_STEP], ASYNC)
    assert "old log-probs" in batch_table(config), "for samples of older weights"


def test_a_correction_runs_between_old_log_probs_and_the_updates() -> None:
    config = load(*GRPO_OF_ONE_STEP, "correction=decoupled_geo_rs_seq_tis")
    assert not update_can_compute_old_log_probs(config), "the whole batch is corrected before"
    after = edges(step_nodes(config))
    assert after["algorithm.rollout_correction"] == [
        "actor.compute_log_prob",
        "rollout.generate_sequences",
    ]
    assert "algorithm.rollout_correction" in after["actor.update_actor"]

    with_critic = load("correction=decoupled_geo_rs")
    assert "algorithm.rollout_correction" in edges(step_nodes(with_critic))["critic.update_critic"]
    split = load("correction=decoupled_token_is", "placement=split", "trainer.n_gpus_per_node=2")
    assert "in update: critic.update_critic ‖ actor.update_actor" in overlaps(split)


def test_a_bypass_has_no_pass_for_old_log_probs() -> None:
    for updates in ((), ("actor_rollout_ref.actor.ppo_epochs=2",)):
        config = load(*GRPO_OF_ONE_STEP, "correction=bypass_ppo_clip_geo_rs", *updates)
        assert not update_can_compute_old_log_probs(config), "the rollout has them"
        graph, _, notice = describe(config).partition("note: ")
        assert notice.startswith("bypass_mode uses the rollout's log-probs")
        assert "compute_log_prob" not in graph
        assert "algorithm.rollout_correction" not in graph
