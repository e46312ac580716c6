"""The four listings of verl's split-placement README run once their import lines are changed."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import ROOT
from trainer import load_config
from verl_like import (
    ClassWithInitArgs,
    DataProto,
    LocalWorkerGroup,
    ResourcePoolManager,
    create_colocated_worker_cls,
)

IMPORTS = """
from verl_like import DataProto, Dispatch, Role, Worker, register
"""
STEP_1 = """
actor_rollout_ref_pool_id = 'actor_rollout_ref_pool'
critic_pool_id = 'critic_pool'
if config.trainer.nnodes // 2 == 0 and config.trainer.n_gpus_per_node // 2 > 0:
    resource_pool_spec = {
        actor_rollout_ref_pool_id: [config.trainer.n_gpus_per_node // 2] * config.trainer.nnodes,
        critic_pool_id: [config.trainer.n_gpus_per_node // 2] * config.trainer.nnodes,
    }
else:
    resource_pool_spec = {
        actor_rollout_ref_pool_id: [config.trainer.n_gpus_per_node] * (config.trainer.nnodes // 2),
        critic_pool_id: [config.trainer.n_gpus_per_node] * (config.trainer.nnodes // 2),
    }
print(f'resource_pool_spec: {resource_pool_spec}')
mapping = {
    Role.ActorRollout: actor_rollout_ref_pool_id,
    Role.Critic: critic_pool_id,
    Role.RefPolicy: actor_rollout_ref_pool_id,
}
mapping[Role.RewardModel] = critic_pool_id
"""
STEP_2 = """
@register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
def update_actor(self, data: DataProto):
    ...

@register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
def update_critic(self, data: DataProto):
    ...
"""
STEP_3 = """
critic_output = critic_output.get()
actor_output = actor_output.get()
"""
STEP_4 = """
bash run_deepseek7b_llm.sh
"""
BODY = "return DataProto.from_dict({'sum': data.batch['x'] + self.rank * 0})"


@pytest.mark.parametrize(("nnodes", "devices", "per_pool"), [(1, 4, [2]), (1, 2, [1]), (2, 2, [2])])
def test_the_listings_run(
    nnodes: int, devices: int, per_pool: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    space = {
        "config": SimpleNamespace(trainer=SimpleNamespace(nnodes=nnodes, n_gpus_per_node=devices))
    }
    exec(IMPORTS + STEP_1, space)
    assert "resource_pool_spec: {'actor_rollout_ref_pool'" in capsys.readouterr().out
    manager = ResourcePoolManager(
        resource_pool_spec=space["resource_pool_spec"], mapping=space["mapping"]
    )
    assert manager.get_resource_pool("actor").store == per_pool
    assert manager.get_resource_pool(space["Role"].RewardModel) is manager.get_resource_pool(
        "critic"
    )
    if devices == 4:
        return  # the processes below are those of the smaller cases
    methods = textwrap.indent(STEP_2, "    ").replace("...", BODY)
    exec(f"class TheWorker(Worker):\n{methods}", space)
    groups = {}
    for role in ("actor", "critic"):
        role_class = create_colocated_worker_cls({role: ClassWithInitArgs(space["TheWorker"])})
        groups |= LocalWorkerGroup(manager.get_resource_pool(role), role_class).spawn([role])
    batch = DataProto.from_dict({"x": torch.arange(5)})
    space["critic_output"] = groups["critic"].update_critic(batch)
    space["actor_output"] = groups["actor"].update_actor(batch)
    exec(STEP_3, space)
    for name in ("critic_output", "actor_output"):
        assert space[name].batch["sum"].tolist() == list(range(5))
    for group in groups.values():
        group.shutdown()


def machine_of_eight_gpus(folder: Path) -> dict[str, str]:
    """An environment for the example; its Python prints its arguments, one per line."""
    programs = {
        "nvidia-smi": "seq 8",
        "python": 'case "$*" in -P*) exit 0 ;; esac\nprintf "%s\\n" "$@"',
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "train.parquet").touch()
    path = f"{folder}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHON": f"{folder}/python", "DATA": str(folder)}


def test_the_last_listing_runs_on_the_pools_of_the_first(tmp_path: Path) -> None:
    done = subprocess.run(
        STEP_4.split(),
        cwd=ROOT / "examples" / "split_placement",
        env=machine_of_eight_gpus(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    option, program, *overrides = done.stdout.splitlines()
    assert (option, program) == ("-m", "trainer.main_ppo")

    config = load_config(overrides)
    space = {"config": config}
    exec(IMPORTS + STEP_1, space)
    assert config.resource_pool_spec == space["resource_pool_spec"]
    roles, pools = space["Role"], space["mapping"]
    assert config.role_mapping["actor_rollout"] == pools[roles.ActorRollout]
    assert config.role_mapping["critic"] == pools[roles.Critic]
    assert config.role_mapping["ref"] == pools[roles.RefPolicy]
