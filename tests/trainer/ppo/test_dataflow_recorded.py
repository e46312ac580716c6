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
from trainer.ppo.dataflow import (
    STEP_1_NOTICE,
    CallNode,
    describe,
    edges,
    overridden_stages,
    side_by_side,
    step_nodes,
)

ROLES = {
    "all four roles": (),
    "old log-probs by the update": (
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ),
    "dynamic sampling": ("algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true"),
}
PLACED_BY_THE_DRIVER = "update_weights"
"""The stage whose calls `sync_weights` makes, a node of the driver."""


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
        if call["stage"] == PLACED_BY_THE_DRIVER:
            continue
        name = f"{call['role']}.{call['method']}"
        span = spans.setdefault(name, dict(call))
        span["start"] = min(span["start"], call["start"])
        span["end"] = max(span["end"], call["end"])
    return step_nodes(config), spans


def on_roles(nodes: Sequence[CallNode]) -> dict[str, CallNode]:
    return {node.name: node for node in nodes if node.pool != "driver"}


def check(nodes: Sequence[CallNode], spans: dict[str, dict[str, Any]]) -> None:
    """Check that nodes are calls in their stage and pool that start after their dependencies."""
    drawn = on_roles(nodes)
    assert set(drawn) == set(spans)
    for name, node in drawn.items():
        assert (spans[name]["stage"], spans[name]["pool"]) == (node.stage, node.pool)
    after = edges(nodes)
    for name in drawn:
        for earlier in set(after[name]) & set(drawn):
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
    by_path = "trainer.ppo.advantages.reinforce.compute_remax_outcome_advantage"
    estimator = ("placement=colocate", f"algorithm.adv_estimator={by_path}")
    nodes, spans = recorded(tiny_dir, tmp_path, *estimator)
    check(nodes, spans)
    assert "greedy_scores" in {node.name for node in nodes}


def test_the_int8_reference_adds_a_pass_in_step_1(tiny_dir: Path, tmp_path: Path) -> None:
    settings = (
        *ROLES["old log-probs by the update"],
        "algorithm.use_kl_in_reward=false",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.ref.quantization=int8",
    )
    config = load_config(overrides(tiny_dir, tmp_path, "placement=colocate", *settings))
    assert "actor.compute_log_prob" in {node.name for node in step_nodes(config)}
    assert describe(config).endswith(STEP_1_NOTICE)


def test_calls_overlap_across_pools_but_not_within_a_process(
    tiny_dir: Path, tmp_path: Path
) -> None:
    split = ("placement=split", "trainer.n_gpus_per_node=4")
    nodes, spans = recorded(tiny_dir, tmp_path, *split)
    check(nodes, spans)
    drawn = on_roles(nodes)

    overlaps = side_by_side(nodes, edges(nodes))
    names = [(first.name, second.name) for first, second in overlaps]
    pairs = [pair for pair in names if set(pair) <= set(drawn)]
    assert ("critic.update_critic", "actor.update_actor") in pairs
    for first, second in pairs:
        if drawn[first].pool != drawn[second].pool and drawn[first].stage == "update":
            assert overlapping(spans[first], spans[second]), (first, second)

    for call, later in combinations(Recorded.calls_of_step, 2):
        if call["pid"] == later["pid"]:
            assert not overlapping(call, later), (call["method"], later["method"])


def overlapping(call: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the calls overlap by more than the reading of a clock takes."""
    return min(call["end"], other["end"]) > max(call["start"], other["start"]) + 1e-3


class OwnEstimate(PPOTrainer):
    """Replaces a stage."""

    def estimate(self, batch: Any) -> Any:
        return batch, {}


class OwnUpdate(OwnEstimate):
    """Wraps a stage."""

    def update(self, batch: Any) -> dict[str, float]:
        return super().update(batch) | {"mine": 1.0}


def test_the_graph_names_overridden_stages(tiny_dir: Path, tmp_path: Path) -> None:
    overridden = overridden_stages(OwnUpdate)
    assert overridden == ["OwnEstimate.estimate", "OwnUpdate.update"]
    text = describe(load_config(overrides(tiny_dir, tmp_path)), overridden=overridden)
    assert text.endswith(
        "the graph shows the calls of PPO; OwnEstimate.estimate, OwnUpdate.update may make "
        "other calls"
    )
    assert overridden_stages(Recorded) == [], "a hook is no stage"
