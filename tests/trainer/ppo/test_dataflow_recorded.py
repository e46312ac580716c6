"""The nodes of the printed graph of a step are the calls that a real run makes.

Tiny models run in this process, or in two processes per pool if calls must run concurrently.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import overrides
from trainer import PPOTrainer, load_config, run
from trainer.ppo.dataflow import STEP_1_NOTICE, describe
from trainer.stubs import CallNode, trace_step
from verl_like.batch.protocol import DataProto
from workers.columns import read_column

ROLES = {
    "all four roles": (),
    "old log-probs by the update": (
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ),
    "dynamic sampling": ("algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true"),
}


class Recorded(PPOTrainer):
    """Records the calls of its one step, each with its stage."""

    calls_of_step: list[dict[str, Any]]

    def on_step_end(self, metrics: dict[str, float]) -> None:
        Recorded.calls_of_step = list(self.run.calls)


def recorded(
    tiny: Path, folder: Path, *more: str
) -> tuple[list[CallNode], dict[str, dict[str, Any]]]:
    """Return the nodes of a configuration, and the calls of a step on roles by their names."""
    short = ("trainer.backend=local", "trainer.total_training_steps=1")
    config = load_config(overrides(tiny, folder, *short, "data.max_response_length=4", *more))
    run(config, Recorded)

    spans: dict[str, dict[str, Any]] = {}
    for call in Recorded.calls_of_step:
        name = f"{call['role']}.{call['method']}"
        span = spans.setdefault(name, dict(call))
        span["start"] = min(span["start"], call["start"])
        span["end"] = max(span["end"], call["end"])
    nodes, problem = trace_step(config)
    assert not problem
    return nodes, spans


def on_roles(nodes: Sequence[CallNode]) -> dict[str, CallNode]:
    return {node.name: node for node in nodes if node.roles}


def check(nodes: Sequence[CallNode], spans: dict[str, dict[str, Any]]) -> None:
    """Check that nodes are calls in their stage and pool that start after their dependencies."""
    drawn = on_roles(nodes)
    assert set(drawn) == set(spans)
    for name, node in drawn.items():
        assert (spans[name]["stage"], spans[name]["pool"]) == (node.stage, node.pool)
    for name, node in drawn.items():
        for earlier in {name for _, name in node.after} & set(drawn):
            assert spans[earlier]["end"] <= spans[name]["start"] + 1e-3, (earlier, name)


@pytest.mark.parametrize(
    ("placement", "num_pools", "roles"),
    [
        ("colocate", 1, "all four roles"),
        ("colocate", 1, "old log-probs by the update"),
        ("standalone", 3, "dynamic sampling"),
    ],
)
def test_every_node_is_a_call(
    tiny_dir: Path, tmp_path: Path, placement: str, num_pools: int, roles: str
) -> None:
    pools = (f"placement={placement}", f"trainer.n_gpus_per_node={num_pools}")
    check(*recorded(tiny_dir, tmp_path, *pools, *ROLES[roles]))


def test_reward_models_and_teachers_are_nodes(
    tiny_dir: Path, classifier: Path, tmp_path: Path
) -> None:
    model = ("reward.model.enable=true", f"reward.model.path={classifier}")
    path = f"distillation.teacher_model.model_path={tiny_dir}/model"
    teacher = (path, "distillation.use_task_rewards=true")
    pools = ("placement=standalone", "trainer.n_gpus_per_node=6")
    nodes, spans = recorded(tiny_dir, tmp_path, *pools, *model, *teacher)
    check(nodes, spans)
    assert {"reward_model.compute_rm_score", "teacher.compute_teacher_log_prob"} <= spans.keys()


def test_greedy_responses_of_remax_are_nodes(tiny_dir: Path, tmp_path: Path) -> None:
    by_path = "trainer.ppo.advantages.estimators.compute_remax_outcome_advantage"
    estimator = ("placement=colocate", f"algorithm.adv_estimator={by_path}")
    nodes, spans = recorded(tiny_dir, tmp_path, *estimator)
    check(nodes, spans)
    assert ("sample", "rewards") in {node.key for node in nodes}, "of greedy responses"


def test_the_int8_reference_adds_a_pass_in_step_1(tiny_dir: Path, tmp_path: Path) -> None:
    settings = (
        *ROLES["old log-probs by the update"],
        "algorithm.use_kl_in_reward=false",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.ref.quantization=int8",
    )
    config = load_config(overrides(tiny_dir, tmp_path, "placement=colocate", *settings))
    nodes, problem = trace_step(config)
    assert "actor.compute_log_prob" in {node.name for node in nodes}
    assert describe(config, nodes, problem).endswith(STEP_1_NOTICE)


def test_calls_overlap_across_pools_but_not_within_a_process(
    tiny_dir: Path, tmp_path: Path
) -> None:
    split = ("placement=split", "trainer.n_gpus_per_node=4")
    nodes, spans = recorded(tiny_dir, tmp_path, *split)
    check(nodes, spans)
    pairs = [
        (first.name, second.name)
        for first, second in combinations(on_roles(nodes).values(), 2)
        if first.stage == second.stage == "update" and first.key not in second.after
    ]
    assert pairs == [("critic.update_critic", "actor.update_actor")]
    assert overlapping(*(spans[name] for name in pairs[0]))

    for call, later in combinations(Recorded.calls_of_step, 2):
        if call["pid"] == later["pid"]:
            assert not overlapping(call, later), (call["method"], later["method"])


def overlapping(call: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the calls overlap by more than the reading of a clock takes."""
    return min(call["end"], other["end"]) > max(call["start"], other["start"]) + 1e-3


class ScoresTwice(PPOTrainer):
    """Scores in turns, without the reference, and asks the rollout for more samples."""

    def score(self, batch: Any) -> Any:
        log_probs = self.call("actor", "compute_log_prob", batch).get().batch
        values = self.call("critic", "compute_values", batch.union(log_probs)).get()
        more = self.generate(next(self.prompts))
        scores, metrics = self.rollouts.score(more)
        assert len(scores) == len(batch)
        return scores.union(values), metrics | {"mine": 1.0}

    def update(self, batch: Any) -> dict[str, float]:
        return super().update(batch.union(self.call("ref", "compute_ref_log_prob", batch).get()))

    def estimate(self, batch: Any) -> Any:
        return batch.union(DataProto.from_dict({"mine": read_column(batch, "values")})), {}


def test_an_overridden_stage_shows_the_calls_that_it_makes(tiny_dir: Path, tmp_path: Path) -> None:
    split = ("placement=split", "trainer.n_gpus_per_node=2", "trainer.backend=ray")
    config = load_config(overrides(tiny_dir, tmp_path, *split))
    nodes, problem = trace_step(config, ScoresTwice)
    assert not problem
    assert [node.key for node in nodes] == [
        ("sample", "prompts"),
        ("sample", "rollout.generate_sequences"),
        ("score", "actor.compute_log_prob"),
        ("score", "critic.compute_values"),
        ("score", "prompts"),
        ("score", "rollout.generate_sequences"),
        ("score", "rewards"),
        ("estimate", "mine"),
        ("update", "ref.compute_ref_log_prob"),
        ("update", "critic.update_critic"),
        ("update", "actor.update_actor"),
        ("sync", "rollout.update_weights"),
    ]
    values = nodes[3]
    assert ("score", "actor.compute_log_prob") in values.after, "it is in turns, on two pools"
    assert "Concurrent in score" not in describe(config, nodes, problem)
    assert not any(tmp_path.iterdir()), "a step on stubs leaves the run folder alone"


class ReadsMore(PPOTrainer):
    """Reads a column that no worker declares."""

    def score(self, batch: Any) -> Any:
        batch, metrics = super().score(batch)
        return batch, metrics | {"mine": batch.batch["undeclared"].mean()}


def test_a_stage_that_fails_on_stubs_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    config = load_config(overrides(tiny_dir, tmp_path))
    nodes, problem = trace_step(config, ReadsMore)
    assert nodes[-1].stage == "score"
    last = describe(config, nodes, problem).splitlines()[-1]
    assert "further calls are not known" in last
    assert "@batch_columns" in last
    assert "undeclared" in last
