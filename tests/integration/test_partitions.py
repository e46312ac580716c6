"""On every partition of the five roles over pools a step gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.integration.runs import overrides
from trainer import PPOTrainer, load_config
from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Loop
from trainer.ppo.config import PPOConfig
from trainer.run_state import Metrics, Run
from trainer.tools.planner.search import partitions

ROLES = ("actor", "rollout", "ref", "critic", "reward_model")
PARTITIONS = sorted(partitions(ROLES))
SELECTED = PARTITIONS[5::9]
"""Each two roles share a pool in some of these, and have separate pools in others."""
SETTINGS = [
    "trainer.backend=local",
    "reward.model.enable=true",
    "trainer.total_training_steps=1",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=1",
    "data.max_response_length=2",
]
Partition = Sequence[Sequence[str]]
Step = Callable[[Partition, str], Metrics]


@pytest.fixture(scope="module")
def step(
    make_tiny: ModuleType, classifier: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Step]:
    """Return the metrics of a first step of real roles on these pools, without times."""
    folder = tmp_path_factory.mktemp("partitions")
    tiny = make_tiny.make(folder / "tiny", num_train=2, hidden_size=16, num_layers=1)
    files = (f"data.train_files={tiny}/train.parquet", f"reward.model.path={classifier}")
    config = load_config(overrides(tiny, folder / "run", *files, *SETTINGS))
    with ExitStack() as at_end:
        inputs = PPOTrainer.prepare(config, at_end)
        config = PPOTrainer.recipe.resolve(config)
        yield partial(run_step, config, inputs, inputs[1].state_dict())


def run_step(
    config: PPOConfig, inputs: Sequence[Any], at_start: Any, partition: Partition, backend: str
) -> Metrics:
    pools = dict(enumerate(partition))
    trainer = replace(config.trainer, backend=backend, n_gpus_per_node=len(partition))
    placed = replace(
        config,
        trainer=trainer,
        resource_pool_spec={f"p{number}": [1] for number in pools},
        role_mapping={role: f"p{number}" for number in pools for role in pools[number]},
    )
    inputs[1].load_state_dict(at_start)
    with WorkerGroups(placed) as groups:
        assert set(groups) == set(ROLES)
        ppo = PPOTrainer(Run(placed, groups), *inputs)
        Loop(ppo).init_models()
        ppo.run.step = 1
        metrics = ppo.step()
    clock = ("timing", "perf/")
    return {name: n for name, n in metrics.items() if not name.startswith(clock)}


@pytest.fixture(scope="module")
def expected(step: Step) -> Metrics:
    return step([list(ROLES)], "local")


def test_partitions_run_a_step_in_process_with_the_same_numbers(
    step: Step, expected: Metrics
) -> None:
    for one, other in combinations(ROLES, 2):
        together = [any({one, other} <= {*pool} for pool in partition) for partition in SELECTED]
        assert {*together} == {True, False}, (one, other)
    differing = [partition for partition in SELECTED if step(partition, "local") != expected]
    assert differing == []


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_every_partition_runs_a_step_on_ray_with_the_same_numbers(
    ray_session: None, step: Step, expected: Metrics, partition: Partition
) -> None:
    assert step(partition, "ray") == expected
