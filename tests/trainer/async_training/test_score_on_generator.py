"""Generators that score their samples: with references, reward models and copies of the critic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.integration.runs import FEW_ROWS, calls, lines, overrides
from tests.trainer.async_training.test_resumed import interrupted_run
from tests.trainer.async_training.test_run import (
    LOCAL,
    TWO_STEPS,
    ledger_of,
    run_async,
    shared_numbers,
)
from trainer import load_config, run
from trainer.async_training.checks import plan_lines
from trainer.async_training.config import AsyncConfig
from trainer.async_training.recipe import ASYNC
from trainer.async_training.step import AsyncTrainer
from trainer.stubs import trace_step
from verl_like.errors import ConfigError
from verl_like.placement.pools import expand_roles

ON_GENERATOR = "async_training.score_on=generator"
SCORES = ("compute_ref_log_prob", "compute_values", "compute_rm_score")

CONCURRENT = ("open_delivery", "deliver_weights", "receive_weights", "ping")
"""Calls of `sync_weights`, which is a node of the driver, and of waits during generation."""

GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2")

ROW_BY_ROW = (
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
)
"""Otherwise a chunk and a batch have rows in different passes, which round differently."""


def two_models(classifier: Path) -> str:
    """A rule and two models, the second normalized over the batch."""
    model = f"kind: model, path: '{classifier}', micro_batch_size_per_gpu: 1"
    second = f"{{name: second, {model}, weight: 0.5, normalize: true}}"
    return f"reward.list=[{{name: rule}},{{name: first, {model}}},{second}]"


def roles_of(folder: Path, methods: Iterable[str] = SCORES) -> dict[str, set[str]]:
    """Return method -> the roles that a run called it on."""
    return {method: {event["cat"] for event in calls(folder, method)} for method in methods}


def configured(*more: str) -> AsyncConfig:
    needed = ("data.train_files=x", "actor_rollout_ref.model.path=y")
    return load_config([*needed, ON_GENERATOR, "algorithm.use_kl_in_reward=true", *more], ASYNC)


@pytest.mark.long
def test_scores_equal_those_of_the_synchronous_run(
    tiny_dir: Path, classifier: Path, tmp_path: Path
) -> None:
    """Responses that take several calls are scored when they are complete."""
    more = (two_models(classifier), TWO_STEPS, *FEW_ROWS, *ROW_BY_ROW)
    run(load_config(overrides(tiny_dir, tmp_path / "plain", LOCAL, *more)))
    ours = ("async_training.topology=2m1t", "async_training.max_staleness=0", ON_GENERATOR)
    ours += ("actor_rollout_ref.rollout.max_tokens_per_call=3",)
    folder = run_async(tiny_dir, tmp_path / "async", *more, *ours)
    assert shared_numbers(folder) == shared_numbers(tmp_path / "plain")
    assert len(calls(folder, "collect")) > len(calls(folder, "compute_values")) == 2 * 2

    scorers = roles_of(folder)
    roles = {"ref", "critic_copy", "reward_model", "reward_model_second"}
    assert set.union(*scorers.values()) == roles | {f"{role}_1" for role in roles}
    check_graph(folder, overrides(tiny_dir, folder, LOCAL, *more, *ours))
    scored = {event["args"]["pid"] for method in SCORES for event in calls(folder, method)}
    assert scored == {event["args"]["pid"] for event in calls(folder, "submit")}


def check_graph(folder: Path, settings: list[str]) -> None:
    """Check that the graph has the run's calls of roles, each in its stage and on its pools."""
    config = load_config(settings, ASYNC)
    pools = expand_roles(config.role_mapping)
    recorded = defaultdict[tuple[str, str], set[str]](set)
    for event in calls(folder):
        if (
            event["args"]["stage"] in ("sample", "score", "update")
            and event["name"] not in CONCURRENT
        ):
            name = f"{config.kind_of(event['cat'])}.{event['name']}"
            recorded[event["args"]["stage"], name].add(pools[event["cat"]])
    for node in trace_step(config)[0]:
        if node.roles and node.stage != "sync":
            assert recorded.pop((node.stage, node.name)) == set(node.pool.split(", "))
    assert not recorded


def test_values_are_no_staler_than_their_samples(tiny_dir: Path, tmp_path: Path) -> None:
    folder = run_async(
        tiny_dir, tmp_path, ON_GENERATOR, *FEW_ROWS, "async_training.max_staleness=1"
    )
    ledger = ledger_of(folder)
    assert ledger["trainers"] == {"0": 3 * 8}
    assert all(row["made"] == row["trained"] for row in ledger["generators"].values())
    steps = lines(folder)
    assert max(line["async/value_staleness/max"] for line in steps) == 1
    for line in steps:
        assert line["async/value_staleness/max"] <= line["async/staleness/max"]


@pytest.mark.long
def test_queued_samples_are_restored_with_their_scores(tiny_dir: Path, tmp_path: Path) -> None:
    settings = (ON_GENERATOR, "async_training.on_resume=restore", *FEW_ROWS)
    queued = interrupted_run(tiny_dir, tmp_path, *settings)
    assert len(list(queued.glob("*.safetensors"))) == 2
    run_async(
        tiny_dir, tmp_path, *settings, "async_training.max_staleness=2", "trainer.save_freq=1"
    )
    assert roles_of(tmp_path)["compute_values"] == {"critic_copy"}
    for method in ("submit", "compute_values", "compute_ref_log_prob"):
        assert len(calls(tmp_path, method)) == 3, "none after the resume"
    assert ledger_of(tmp_path)["trainers"] == {"0": 3 * 8}


def test_generators_have_the_roles_that_score() -> None:
    config = configured("async_training.topology=2m1t")
    roles = config.role_mapping
    assert {role for role, pool in roles.items() if pool == "trainer_pool"} == {"actor", "critic"}
    assert {role for role, pool in roles.items() if pool == "generator_1_pool"} == {
        *("rollout_1", "ref_1", "critic_copy_1")
    }
    assert config.role_workers["critic_copy_1"] == config.role_workers["critic_copy"]
    assert "Scores: each generator scores its samples with its own ref, critic_copy" in plan_lines(
        config
    )
    text = "\n".join(AsyncTrainer.recipe.describe(config, AsyncTrainer, False))
    assert "critic_copy.compute_values" in text


def test_each_reward_model_of_a_further_generator_has_its_own_reward() -> None:
    rewards = "reward.list=[{name: a, kind: model, path: x}, {name: b, kind: model, path: y}]"
    config = configured(rewards, "async_training.generators=2")
    assert [reward.path for reward in config.for_role("reward_model_b_1").reward.list] == ["y"]
    assert [reward.path for reward in config.for_role("reward_model_1").reward.list] == ["x"]
    assert config.role_workers["reward_model_b_1"] == config.role_workers["reward_model_b"]


MODELS = ",".join(f"{{kind: model, path: x, name: {name}}}" for name in ("a", "b", "b_1"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["role_mapping.ref=trainer_pool"], "ref=trainer_pool is not rollout's pool, generator_0"),
        (["actor_rollout_ref.ref.update_every=2"], "the generators' references do not change"),
        (
            ["async_training.weight_update=immediate"],
            "copy of the critic receives weights only between two calls",
        ),
        ([*GRPO, "algorithm.use_kl_in_reward=false"], "no reference, reward model or critic"),
        (["role_workers.critic=verl_like.Worker"], "verl_like.Worker cannot publish its weights"),
        ([f"reward.list=[{MODELS}]"], "ends in a number.*reward_model_b_1.*Rename"),
    ],
)
def test_unscorable_settings_are_rejected_early(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured("async_training.generators=2", *settings)
