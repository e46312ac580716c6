"""Composed configurations: limits, partitions of roles, tables of sizes, rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import load_config
from trainer.config.schema import TrainerConfig
from trainer.config.settle import settle
from trainer.launch import nominal_placement
from trainer.ppo.memory import batch_table
from trainer.ppo.recipe import PPO
from trainer.stubs import trace_step
from trainer.tools.planner.search import partitions
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError

NEEDED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"),
    [(None, None, 5), (None, 2, 10), (7, None, 7), (7, 1, 5), (7, 2, 7)],
)
def test_the_first_limit_ends_a_run(steps: int | None, epochs: int | None, expected: int) -> None:
    trainer = TrainerConfig(total_training_steps=steps, total_epochs=epochs)
    assert trainer.num_steps(lambda passes: 5 * passes) == expected


ROWS = "actor_rollout_ref.actor.use_dynamic_bsz=false"


def test_passes_are_cut_by_tokens_by_default(caplog: pytest.LogCaptureFixture) -> None:
    def by_tokens(*settings: str) -> bool:
        return load_config([*NEEDED, *settings]).actor_rollout_ref.actor.use_dynamic_bsz

    assert by_tokens()
    assert "counts samples" not in caplog.text
    assert not by_tokens("critic.ppo_micro_batch_size_per_gpu=4")
    assert "note: critic.ppo_micro_batch_size_per_gpu counts samples" in caplog.text
    assert not by_tokens(ROWS)


ALL_ROLES = [
    "algorithm.use_kl_in_reward=true",
    "reward.model.enable=true",
    "reward.model.path=model",
]


def test_every_partition_of_roles_over_pools_is_planned() -> None:
    config = load_config([*NEEDED, *ALL_ROLES, "trainer.n_gpus_per_node=10"])
    roles = ("actor", "rollout", "ref", "critic", "reward_model")
    count = 0
    for number, parts in enumerate(partitions(roles)):
        spec = {f"p{place}": [1 + (number + place) % 2] for place in range(len(parts))}
        mapping = {role: f"p{place}" for place, part in enumerate(parts) for role in part}
        composed = replace_keys(config, {"resource_pool_spec": spec, "role_mapping": mapping})
        config, _ = settle(PPO, composed, [f"resource_pool_spec.{pool}" for pool in spec])
        pools = nominal_placement(config).pools
        assert {name: sorted(plan.roles) for name, plan in pools.items()} == {
            f"p{place}": sorted(part) for place, part in enumerate(parts)
        }
        assert batch_table(config, trace_step(config)[0])
        count += 1
    assert count == 52


def test_a_section_of_free_names_is_set_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    pools = ["resource_pool_spec={a: [1], b: [2]}", "role_mapping={actor_rollout: a, critic: b}"]
    values = [
        "actor_rollout_ref.rollout.sampling_kwargs={min_p: 0.1}",
        "trainer.stop_at={critic/score/mean: 0.8}",
    ]
    config = load_config([*NEEDED, "trainer.n_gpus_per_node=3", *pools, *values])
    assert config.resource_pool_spec == {"a": [1], "b": [2]}
    assert config.role_mapping == {"actor_rollout": "a", "critic": "b"}
    assert config.actor_rollout_ref.rollout.sampling_kwargs == {"min_p": 0.1}
    assert config.trainer.stop_at == {"critic/score/mean": 0.8}
    assert "different numbers of devices" not in caplog.text
    for unknown in ("+nosuch={}", "+trainer.nosuch={a: 1}", "algorithm={kl_ctrl: {nosuch: 1}}"):
        with pytest.raises(ConfigError, match=r"there is no key .*nosuch"):
            load_config([*NEEDED, unknown])


def table_of(*settings: str) -> list[str]:
    config = load_config([*NEEDED, *settings])
    return batch_table(config, trace_step(config)[0]).splitlines()


def test_the_table_has_every_size_in_its_unit() -> None:
    sizes = [
        "data.train_batch_size=24",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
    ]
    lengths = [
        "data.max_prompt_length=10",
        "data.max_response_length=30",
        "trainer.n_gpus_per_node=3",
    ]
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"
    lines = table_of(*sizes, *lengths, micro, "placement=split")
    cells = {name: numbers.split() for name, numbers in (line.split("  ", 1) for line in lines[2:])}
    assert cells["rollout.generate_sequences"] == ["2", "24", "96", "48", "48", "1,920"]
    assert cells["actor.update_actor"] == ["2", "8", "32", "16", "2", "80"]
    assert cells["critic.update_critic"][0] == "1"
    tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=320"
    for settings, at_once in ((), "440"), ((tokens,), "320"):
        by_tokens = table_of(*sizes, *lengths, *settings)
        assert by_tokens[-1].split()[-3:] == ["by", "tokens", at_once]


def test_ranks_that_share_a_model_have_the_same_samples() -> None:
    ranks = "trainer.n_gpus_per_node=4", "placement=colocate"
    lengths = "data.max_prompt_length=10", "data.max_response_length=30"
    axes = [
        "actor_rollout_ref.actor.parallel.pp=2",
        "actor_rollout_ref.actor.parallel.sp=2",
        "critic.parallel.tp=2",
    ]
    sizes = [*lengths, "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    lines = table_of(*ranks, *sizes, *axes)
    cells = {name: numbers.split() for name, numbers in (line.split("  ", 1) for line in lines[2:])}
    assert cells["actor.update_actor"][:4] == ["4", "8", "8", "8"]
    assert cells["critic.update_critic"][:4] == ["4", "8", "8", "4"]


def test_grpo_process_is_biased_with_environments(caplog: pytest.LogCaptureFixture) -> None:
    settings = [*NEEDED, "algorithm.adv_estimator=grpo_process", "actor_rollout_ref.rollout.n=2"]
    load_config(settings)
    assert "is biased" not in caplog.text
    load_config([*settings, "environment=tests.workers.agents.games:Count"])
    assert "adv_estimator=grpo_process is biased where the policy chooses its number" in caplog.text


@pytest.mark.parametrize("path", ["my.py", "my_package.rewards"])
def test_a_reward_is_a_path_and_a_function(path: str) -> None:
    function = load_config([*NEEDED, f"reward={path}:score"]).reward.function
    assert (function.path, function.name) == (path, "score")
    config = load_config([*NEEDED, f"reward={path}", "reward.max_failed_fraction=0.1"])
    assert (config.reward.function.path, config.reward.max_failed_fraction) == (path, 0.1)


def test_a_key_of_verl_in_a_file_is_rejected_with_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nreward_model: {enable: true, model: {path: m}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(NEEDED, PPO.with_files_of(tmp_path, "mine"))
    for key in ("'reward.model.enable'", "'reward.model.path'"):
        assert f"Here it is {key}." in str(caught.value)


def test_settings_are_a_list() -> None:
    with pytest.raises(ConfigError, match=r"load_config takes a list, load_config\(\['trainer"):
        load_config("trainer.seed=2")
    with pytest.raises(ConfigError, match=r"load_config\(3\): pass a list of settings"):
        load_config(3)  # type: ignore[arg-type]
