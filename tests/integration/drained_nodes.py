"""Runs on a simulated cluster whose nodes Ray drains; run by `test_drained_nodes.py`.

python -m tests.integration.drained_nodes TINY_DIR RUN_DIR        prints what happened
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

from tests.forked_ray import ask_for_forks
from tests.integration.lost_nodes import PPO_POOLS, SHORT, Losing, losing_cluster
from tests.integration.runs import overrides
from tests.programs import tell
from trainer import load_config, run
from trainer.groups.worker_groups import WorkerGroups

STAGES = ("sample", "score", "estimate", "update", "sync")
STEPS = 7
DRAINED = {
    **{step: (stage, ("train_pool",)) for step, stage in enumerate(STAGES, 1)},
    3: ("estimate", ("train_pool", "rollout_pool")),
    6: ("update", ("rollout_pool",)),
}
"""Step -> the stage in which the notice comes, and the pools whose nodes it names."""
DEADLINE_S = 60


def announce_end(node: str) -> None:
    """Announce the end of a node, as a cloud does."""
    client, until = GcsClient(address=Losing.cluster.address), time.time() + DEADLINE_S
    is_accepted, why = client.drain_node(
        node, DRAIN_NODE_REASON_PREEMPTION, "test", int(until * 1000)
    )
    assert is_accepted, why


def drain(groups: WorkerGroups, pool: str) -> str:
    """Add a node, and announce the end of the node of a pool; return its id."""
    Losing.add_node()
    (node,) = groups.placement.pools[pool].nodes
    announce_end(node.key)
    return node.key


class Drains:
    """A callback that drains nodes, and notes where the pools are."""

    def __init__(self) -> None:
        self.drained: list[tuple[int, str, str]] = []
        self.nodes: list[dict[str, str]] = []
        self.pids: list[dict[str, int]] = []

    def on_step_begin(self, trainer: Any) -> None:
        pools = trainer.groups.placement.pools.items()
        self.nodes.append({pool: plan.nodes[0].key for pool, plan in pools})
        self.pids.append({r: trainer.groups[r].transport.started[0].pid for r in trainer.groups})

    def on_stage_begin(self, trainer: Any, stage: str, batch: Any) -> None:
        at, pools = DRAINED.get(trainer.global_step, ("", ()))
        if stage == at:
            for pool in pools:
                key = drain(trainer.groups, pool)
                self.drained.append((trainer.global_step, pool, key))


def main(tiny: Path, folder: Path) -> dict[str, Any]:
    drains = Drains()
    with losing_cluster(2, folder) as here:
        more = (*PPO_POOLS, *SHORT, f"trainer.total_training_steps={STEPS}", "trainer.nnodes=2")
        run(load_config(overrides(tiny, folder / "run", *more, *here)), callbacks=[drains])
        gone = {key for _, _, key in drains.drained}
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return {
            "drained": drains.drained,
            "nodes": drains.nodes,
            "pids": drains.pids,
            "still_there": sorted(gone & alive),
            "log": (folder / "log").read_text(),
        }


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    ask_for_forks(patch)
    tell(main(Path(sys.argv[1]), Path(sys.argv[2])))
