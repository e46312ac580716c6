"""Advice for pools whose nodes are far from each other."""

from __future__ import annotations

from pathlib import Path

from tests.integration.runs import overrides
from trainer import load_config
from trainer.groups.describe import propose_hsdp
from trainer.groups.nodes import plan_on
from trainer.memory import role_models
from verl_like.placement.pools import NodeSpec


def notes_on(tiny: Path, racks: list[str]) -> list[str]:
    """Return the notes for four processes, two on each node."""
    nodes = [
        NodeSpec(f"{n}", 2, 2.0, key=f"{n}", labels={"rack": rack}) for n, rack in enumerate(racks)
    ]
    pools = ("resource_pool_spec.global_pool=[2,2]", "algorithm=grpo", "trainer.nnodes=2")
    config = load_config(overrides(tiny, tiny, *pools, "trainer.backend=ray"))
    return propose_hsdp(plan_on(config, nodes), role_models(config))


def test_hsdp_is_proposed_where_nodes_are_in_different_racks(tiny_dir: Path) -> None:
    (note,) = notes_on(tiny_dir, ["one", "two"])
    assert "global_pool differ in rack" in note
    assert "try actor_rollout_ref.actor.parallel.shard=2" in note
    assert notes_on(tiny_dir, ["one", "one"]) == []
