"""The printed graph of a step follows from the configuration: dependencies and overlap."""

from __future__ import annotations

import sys

import pytest

from trainer import PPOTrainer, load_config
from trainer.async_training.recipe import ASYNC
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe
from trainer.ppo.memory import batch_table
from trainer.ppo.scoring import update_can_compute_old_log_probs
from trainer.stubs import trace_step

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


def waits_of(config: PPOConfig) -> dict[str, set[str]]:
    """Map each node of the table to the nodes that it waits for."""
    nodes, problem = trace_step(config)
    assert not problem
    return {node.name: {name for _, name in node.after} for node in nodes}


def shown(*settings: str) -> str:
    config = load(*settings)
    return describe(config, *trace_step(config))


ESTIMATED = "token_level_rewards, advantages, returns"


def test_a_call_waits_for_what_the_driver_has_waited_for() -> None:
    after = waits_of(load(*SPLIT_PPO))
    assert after["critic.compute_values"] == {"rollout.generate_sequences", "prompts"}
    scores = {"rewards", "actor.compute_log_prob", "ref.compute_ref_log_prob"}
    assert after[ESTIMATED] - after["rewards"] == {*scores, "critic.compute_values"}
    assert ESTIMATED in after["critic.update_critic"]
    assert ESTIMATED in after["actor.update_actor"]
    assert "critic.update_critic" not in after["actor.update_actor"]


def test_the_description_lists_chains_of_concurrent_calls() -> None:
    readings = "(actor.compute_log_prob, then ref.compute_ref_log_prob"
    assert shown(*SPLIT_PPO).splitlines()[-2:] == [
        f"Concurrent in score: rewards ‖ {readings}) ‖ critic.compute_values",
        "Concurrent in update: critic.update_critic ‖ actor.update_actor",
    ]
    colocated = shown("placement=colocate", "algorithm.use_kl_in_reward=true")
    line = f"Concurrent in score: rewards ‖ {readings}, then critic.compute_values)"
    assert colocated.splitlines()[-1] == line


def test_a_reward_model_scores_while_functions_do() -> None:
    judge = "reward_model.compute_rm_score"
    settings = (*SPLIT_PPO, "reward.model.enable=true", "reward.model.path=judge")
    assert f"score: ({judge}, then critic.compute_values) ‖ rewards ‖" in shown(*settings)


def test_pools_in_the_drivers_process_are_sequential() -> None:
    readings = "actor.compute_log_prob, then ref.compute_ref_log_prob"
    settings = (*SPLIT_PPO, "trainer.backend=local")
    assert shown(*settings).splitlines()[-1] == (
        f"Concurrent in score: rewards ‖ ({readings}, then critic.compute_values)"
    )
    update = "Concurrent in update: critic.update_critic ‖ actor.update_actor"
    assert update in shown(*settings, "trainer.n_gpus_per_node=4")
    one_of_two = shown(*settings, "resource_pool_spec.critic_pool=[2]", DEVICES)
    assert update in one_of_two, "it is called first"
    assert "‖ critic.compute_values" not in one_of_two.partition("update:")[0].split("rewards ‖")[0]


def test_a_single_update_per_step_computes_the_old_log_probs() -> None:
    assert update_can_compute_old_log_probs(load(*GRPO_OF_ONE_STEP))
    for setting in (
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=512",
        "algorithm.use_kl_in_reward=true",
    ):
        assert not update_can_compute_old_log_probs(load(*GRPO_OF_ONE_STEP, setting))


def test_breakpoint_in_a_step_stops_in_the_run_and_not_on_stubs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append("stopped"))

    class Stopping(PPOTrainer):
        def estimate(self, batch):
            breakpoint()
            return super().estimate(batch)

    assert trace_step(load(), Stopping)[1] == ""
    assert stops == []
    breakpoint()
    assert stops == ["stopped"]


def test_the_size_table_lists_old_log_probs_only_with_a_separate_pass() -> None:
    bypass = "correction=bypass_ppo_clip_geo_rs"
    for settings in (GRPO_OF_ONE_STEP, (*GRPO_OF_ONE_STEP, bypass)):
        config = load(*settings)
        assert "actor.compute_log_prob" not in batch_table(config, trace_step(config)[0])
    config = load_config([*NEEDED, *GRPO_OF_ONE_STEP], ASYNC)
    table = batch_table(config, trace_step(config)[0])
    assert "actor.compute_log_prob" in table, "for samples of older weights"


def test_a_correction_runs_between_old_log_probs_and_the_updates() -> None:
    config = load(*GRPO_OF_ONE_STEP, "correction=decoupled_geo_rs_seq_tis")
    assert not update_can_compute_old_log_probs(config), "the whole batch is corrected before"
    after = waits_of(config)
    assert "actor.compute_log_prob" in after["algorithm.rollout_correction"]
    assert "algorithm.rollout_correction" in after["actor.update_actor"]

    with_critic = waits_of(load("correction=decoupled_geo_rs"))
    assert "algorithm.rollout_correction" in with_critic["critic.update_critic"]
    split = shown("correction=decoupled_token_is", "placement=split", "trainer.n_gpus_per_node=2")
    assert "in update: critic.update_critic ‖ actor.update_actor" in split


def test_a_bypass_has_no_pass_for_old_log_probs() -> None:
    for updates in ((), ("actor_rollout_ref.actor.ppo_epochs=2",)):
        config = load(*GRPO_OF_ONE_STEP, "correction=bypass_ppo_clip_geo_rs", *updates)
        assert not update_can_compute_old_log_probs(config), "the rollout has them"
        graph, _, notice = describe(config, *trace_step(config)).partition("note: ")
        assert notice.startswith("bypass_mode uses the rollout's log-probs")
        assert "compute_log_prob" not in graph
        assert "algorithm.rollout_correction" not in graph
