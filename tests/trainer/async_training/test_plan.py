"""The description of an asynchronous run before it starts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from trainer.async_training.checks import plan_lines
from trainer.async_training.config import AsyncConfig
from trainer.async_training.recipe import ASYNC
from trainer.groups.describe import describe_devices
from trainer.launch import nominal_placement
from trainer.ppo.memory import call_sizes, role_memories
from trainer.ppo.recipe import load_config
from trainer.stubs import trace_step
from verl_like.errors import ConfigError

NEEDED = (
    "data.train_files=x",
    "actor_rollout_ref.model.path=y",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.adv_estimator=grpo",
)


def config_of(*overrides: str) -> AsyncConfig:
    return load_config([*NEEDED, *overrides], ASYNC)


def test_a_note_names_the_keys_that_use_more_gpus() -> None:
    config = config_of("trainer.simulate=8xH100", "trainer.backend=ray")
    devices, note = describe_devices(config).splitlines()
    assert devices.startswith("Devices: 8 x H100 on 1 node")
    assert note.startswith("note: this run uses 2 of 8 GPUs; raise async_training.generators, ")


def test_an_error_names_the_keys_of_the_pools_instead_of_a_placement() -> None:
    with pytest.raises(ConfigError, match=r"its own pools.*async_training\.generators"):
        config_of("placement=split")


def test_generators_may_be_on_all_simulated_nodes() -> None:
    sizes = ("async_training.generators=9", "data.train_batch_size=72")
    config = config_of("trainer.simulate=16xH100", *sizes)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    assert len(nominal_placement(config).pools) == 10


def test_a_step_of_generators_with_routes_runs_on_stubs() -> None:
    pairs = [f"async_training.{name}_routes=[[0,0],[1,1]]" for name in ("sample", "weight")]
    config = config_of("async_training.generators=2", "async_training.trainers=2", *pairs)
    traced: list[tuple[Any, str]] = []
    thread = threading.Thread(target=lambda: traced.append(trace_step(config)), daemon=True)
    thread.start()
    thread.join(60)
    ((nodes, problem),) = traced
    assert problem == ""
    assert "actor.update_actor" in [node.name for node in nodes]


def test_the_plan_describes_chunks_staleness_and_limits() -> None:
    lines = plan_lines(config_of("async_training.generators=2", "async_training.max_staleness=2"))
    chunks = "Batch: 8 prompts in 2 calls of 4 prompts; each call goes to one generator"
    assert chunks in lines
    assert any("samples are at most 2 versions old in an update" in line for line in lines)
    assert "Samples: at most 96 queued or in generation (3 batches)" in lines
    sync = "after every batch, and a generator loads new weights between two calls"
    assert any(sync in line for line in lines)
    assert any("Correction: rollout_is=token" in line for line in lines)
    assert lines[1].split()[:3] == ["generator", "0", "rollout"]
    two_epochs = "\n".join(plan_lines(config_of("async_training.train_epochs=2")))
    assert "Weight sync: after every batch, trained on 2 times, and a generator" in two_epochs


def test_the_plan_says_how_many_chunks_a_generator_begins_together() -> None:
    config = config_of("async_training.topology=2m4t")
    chunks = "Batch: 8 prompts in 4 calls of 2 prompts; each call goes to one generator"
    assert f"{chunks}, up to 2 calls per generator at the same time" in plan_lines(config)


def test_the_plan_warns_of_unequal_numbers_of_generators_per_trainer() -> None:
    words = "1 has 1 of the generators for its part of a batch, trainer 0 has 2, so every batch"
    assert words in "\n".join(plan_lines(config_of("async_training.topology=3m2t")))
    for even in ("2m1t", "1m2t", "4m2t", "2m2t"):
        lines = plan_lines(config_of(f"async_training.topology={even}"))
        assert "of the generators for" not in "\n".join(lines)


def test_every_generator_is_in_the_table_of_sizes() -> None:
    config = config_of(
        "async_training.generators=2",
        "async_training.score_on=generator",
        "algorithm.use_kl_in_reward=true",
        "async_training.generator_settings={0: {max_num_seqs: 2}, 1: {max_num_seqs: 3}}",
    )
    nodes, _ = trace_step(config)
    sizes = {size.role: size for size in call_sizes(config, nodes) if not size.trains}
    assert set(sizes) == {"rollout", "rollout_1", "actor", "ref", "ref_1"}
    generate, further = sizes["rollout"], sizes["rollout_1"]
    assert (generate.samples, generate.pass_samples) == (4 * 4, 2)
    assert (further.samples, further.pass_samples) == (4 * 4, 3)
    assert sizes["ref_1"].samples == 4 * 4
    assert sizes["actor"].samples == 8 * 4


def test_every_generator_is_in_the_table_of_memory(tiny_dir: Path) -> None:
    settings = (
        f"actor_rollout_ref.model.path={tiny_dir / 'model'}",
        "async_training.generators=3",
        "async_training.generator_settings.1={name: hf, quantization: int8}",
        "resource_pool_spec.generator_2_pool=[2]",
    )
    memories = {role.role: role for role in role_memories(config_of(*settings), "cpu")}
    assert set(memories) == {"rollout", "rollout_1", "rollout_2", "actor"}
    rounded = memories["rollout_1"]
    assert rounded.pool == "generator_1_pool"
    assert rounded.types.startswith("int8")
    assert rounded.weights < memories["rollout"].weights == memories["rollout_2"].weights
