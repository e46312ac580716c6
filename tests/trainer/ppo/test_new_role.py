"""A new frozen role needs only its class, its section and an entry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, overrides
from tests.trainer.ppo.judge_role import ConfigWithJudge, JudgeWorker
from trainer import PPOTrainer, load_config, run
from trainer.ppo.dataflow import describe
from trainer.ppo.memory import batch_table, role_memories
from trainer.ppo.preparation import check_models
from trainer.ppo.recipe import PPO
from trainer.stubs import trace_step
from verl_like.errors import ConfigError
from workers.columns import COLUMNS, method_reads
from workers.roles.actor import ActorWorker
from workers.training.role_model_spec import RoleModelSpec

METHOD = "judge.compute_judge_log_prob"
JUDGED = COLUMNS.pop("judge_log_prob")  # added when the class was imported


@pytest.fixture(autouse=True)
def judged_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge's column is in the table only while the tests of this file run."""
    monkeypatch.setitem(COLUMNS, JUDGED.name, JUDGED)


class Recorded(PPOTrainer):
    """Records the calls of its step, the columns of its batch, and the replaceable roles."""

    calls_of_step: list[str]
    columns: list[str]
    replaceable: frozenset[str]

    def estimate(self, batch: Any) -> Any:
        Recorded.columns = list(batch.batch.keys())
        return super().estimate(batch)

    def on_step_end(self, metrics: dict[str, float]) -> None:
        calls = [call for call in self.run.calls if call["stage"] == "score"]
        Recorded.calls_of_step = [f"{call['role']}.{call['method']}" for call in calls]
        Recorded.replaceable = self.replaceable_roles()


def config_with_judge(tiny: Path, folder: Path, *more: str) -> ConfigWithJudge:
    entry = (
        "+role_workers.judge=tests.trainer.ppo.judge_role.JudgeWorker",
        "+role_mapping.judge=global_pool",
        f"judge.path={tiny}/model",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
    )
    settings = overrides(tiny, folder, "placement=colocate", "trainer.backend=local", *entry, *more)
    return load_config(settings, replace(PPO, schema=ConfigWithJudge))


def test_the_plan_shows_the_new_role(tiny_dir: Path, tmp_path: Path) -> None:
    config = config_with_judge(tiny_dir, tmp_path)
    nodes, problem = trace_step(config)
    (node,) = [node for node in nodes if node.name == METHOD]
    assert (node.stage, node.pool, node.writes) == ("score", "global_pool", ("judge_log_prob",))
    assert METHOD in describe(config, nodes, problem)
    (row,) = [line.split() for line in batch_table(config, nodes).splitlines() if "judge" in line]
    assert row[:4] == [METHOD, "1", "8", "16"]
    assert row[-2] == "3"
    memories = {memory.role: memory for memory in role_memories(config, "cpu")}
    assert memories["judge"].weights == memories["ref"].weights > 0
    assert COLUMNS["judge_log_prob"].written_by == METHOD
    assert {*node.reads} <= {*(method_reads(JudgeWorker, "compute_judge_log_prob") or ())}


def test_a_step_calls_the_role_and_the_role_can_be_replaced(tiny_dir: Path, tmp_path: Path) -> None:
    short = (*FEW_ROWS, "trainer.total_training_steps=1")
    run(config_with_judge(tiny_dir, tmp_path, *short), Recorded)
    assert METHOD in Recorded.calls_of_step
    assert "judge_log_prob" in Recorded.columns
    assert "judge" in Recorded.replaceable


def test_a_missing_model_folder_is_named_by_its_key(tiny_dir: Path, tmp_path: Path) -> None:
    config = config_with_judge(tiny_dir, tmp_path, "judge.path=nowhere")
    with pytest.raises(ConfigError, match="judge.path"):
        check_models(config)


class WithoutMiniBatches(ActorWorker):
    """An actor whose model does not say in which mini-batches it trains."""

    @classmethod
    def role_model(cls, config: Any, role: str = "actor") -> RoleModelSpec:
        return replace(super().role_model(config, role), mini_batch=None)


def test_an_actor_without_a_size_of_mini_batches_is_rejected(
    tiny_dir: Path, tmp_path: Path
) -> None:
    setting = f"role_workers.actor={__name__}.WithoutMiniBatches"
    config = config_with_judge(tiny_dir, tmp_path, setting)
    with pytest.raises(ConfigError, match="WithoutMiniBatches sets no mini_batch.*Pass mini_batch"):
        check_models(config)
