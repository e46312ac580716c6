"""Roles that can be replaced during a run, results of roles, and the wait for rewards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.integration.runs import overrides
from trainer import load_config
from trainer.async_training.recipe import ASYNC
from trainer.config.schema import Recipe
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from trainer.rollouts.rollouts import Rollouts, join_results, replaceable_roles
from verl_like import DataProto
from verl_like.calls.result import CallResult
from verl_like.registry import load_object
from workers.roles.rollout import RolloutWorker, SamplerWorker


class OwnRollout(RolloutWorker):
    """A user's rollout, whose state is unknown."""


def workers_of(recipe: Recipe[Any]) -> dict[str, str]:
    """Return role -> dotted path of its class, from a recipe's YAML."""
    tree: Any = OmegaConf.load(recipe.config_dir / f"{recipe.config_name}.yaml")
    return dict(tree.role_workers)


def test_async_runs_have_the_worker_classes_of_ppo_in_their_order() -> None:
    assert list(workers_of(ASYNC).items()) == list(workers_of(PPO).items())


def groups(**classes: type) -> Any:
    """Return a stand-in for a run's groups: the class of every role, built-in by default."""
    workers = {role: load_object(path, role) for role, path in workers_of(PPO).items()} | classes
    return {role: SimpleNamespace(roles={role: cls}, world_size=4) for role, cls in workers.items()}


@pytest.mark.parametrize(
    ("more", "classes", "replaced"),
    [
        ((), {}, {"rollout", "ref", "teacher", "reward_model"}),
        (("actor_rollout_ref.ref.update_every=2",), {}, {"rollout", "teacher", "reward_model"}),
        ((), {"rollout": OwnRollout}, {"ref", "teacher", "reward_model"}),
        ((), {"rollout": SamplerWorker}, {"rollout", "ref", "teacher", "reward_model"}),
    ],
)
def test_roles_without_state_can_be_replaced(
    tiny_dir: Path,
    tmp_path: Path,
    more: tuple[str, ...],
    classes: dict[str, type],
    replaced: set[str],
) -> None:
    config = load_config(overrides(tiny_dir, tmp_path, *more))
    assert replaceable_roles(config, groups(**classes)) == replaced


def column(name: str, **meta_info: Any) -> DataProto:
    return DataProto.from_dict({name: torch.zeros(2)}, meta_info=meta_info)


def test_columns_go_into_the_batch_and_metrics_of_ranks_are_reduced() -> None:
    results = [column("values"), CallResult(column("ref_log_prob"), {"ref/x": [1.0, 3.0]})]
    batch, metrics = join_results(column("responses"), [*results, {"actor/x": [1.0, 2.0]}])
    assert set(batch.batch.keys()) == {"responses", "values", "ref_log_prob"}
    assert metrics == {"ref/x": 2.0, "actor/x": 1.5}


def test_metrics_are_read_from_where_workers_of_verl_put_them() -> None:
    results = [column("values", metrics={"critic/x": [1.0, 2.0]}), (column("y"), {"actor/x": 3.0})]
    assert join_results(column("responses"), results)[1] == {"critic/x": 1.5, "actor/x": 3.0}


def test_a_wait_for_rewards_checks_for_lost_workers() -> None:
    groups = SimpleNamespace(check_idle=lambda what: None)
    rewards: Any = SimpleNamespace(launch=lambda *arguments: arguments)
    run = SimpleNamespace(groups=groups)
    trainer: Any = SimpleNamespace(config=PPOConfig(), run=run, call=None)
    *_, check = Rollouts(trainer, None, rewards).launch_rewards(None)  # type: ignore
    assert check is groups.check_idle
