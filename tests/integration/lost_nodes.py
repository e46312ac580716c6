"""Runs on a simulated cluster that lose a node; run by `test_lost_nodes.py`.

    python -m tests.integration.lost_nodes TINY_DIR RUN_DIR        prints what happened

Each node has room for one process. At first there are three nodes for two pools: one is spare.
The runs of `two_nodes.py` come first.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.forked_ray import ask_for_forks
from tests.integration.runs import overrides
from tests.integration.two_nodes import on_two_nodes
from tests.programs import tell
from tests.trainer.recipes.regression import REGRESSION, RegressionTrainer
from tests.waiting import wait_until_ended
from trainer import PPOTrainer, launch, load_config, recovery, run
from verl_like.errors import InsufficientResourcesError

PPO_POOLS = (
    "resource_pool_spec={train_pool: [1], rollout_pool: [1]}",
    "role_mapping={actor: train_pool, critic: train_pool, ref: train_pool, rollout: rollout_pool}",
)
SHORT = ("data.train_batch_size=4", "data.max_response_length=4")
STEPS = 4
PLACEMENT_S = 6.0
"""The time limit of the run that gets no other node."""


class Losing:
    """The part of a trainer that loses the node of a role."""

    cluster: ClassVar[Any]
    nodes: ClassVar[dict[str, Any]] = {}
    """By Ray's id of the node."""
    lost_at: ClassVar[list[float]] = []

    @classmethod
    def lose_node_of(cls, groups: Any, role: str) -> None:
        """Kill the node's daemon without warning, and its process a moment later."""
        pid = groups[role].transport.started[0].pid
        pool = groups.placement.role_mapping[role]
        (node,) = groups.placement.pools[pool].nodes
        cls.lost_at.append(time.monotonic())
        cls.cluster.remove_node(cls.nodes.pop(node.key), allow_graceful=False)
        wait_until_ended(pid)

    @classmethod
    def add_node(cls) -> None:
        rack = {"rack": f"r{len(cls.nodes)}"}
        node = cls.cluster.add_node(num_cpus=1, labels=rack)
        cls.nodes[node.node_id] = node


def pids(trainer: Any) -> dict[str, int]:
    return {role: trainer.groups[role].transport.started[0].pid for role in trainer.groups}


class LosesRollout(PPOTrainer):
    """The rollout's node is lost while it generates."""

    pids: ClassVar[list[dict[str, int]]] = []
    nodes: ClassVar[list[str]] = []
    """Of the rollout, as a step begins."""

    def on_step_begin(self) -> None:
        self.pids.append(pids(self))
        (node,) = self.groups.placement.pools["rollout_pool"].nodes
        self.nodes.append(f"{node.name} ({node.key[:8]})")

    def generate(self, prompts: Any, attempt: int = 0) -> Any:
        if self.global_step == 2 and not Losing.lost_at:
            Losing.lose_node_of(self.groups, "rollout")
        return super().generate(prompts, attempt)


class LosesRole(RegressionTrainer):
    """The node of a role is lost in the third step."""

    role: ClassVar[str]
    pids: ClassVar[list[dict[str, int]]] = []

    def replaceable_roles(self) -> frozenset[str]:
        return frozenset({"teacher"})

    def step(self) -> dict[str, float]:
        self.pids.append(pids(self))
        if self.global_step == 3 and not Losing.lost_at:
            Losing.lose_node_of(self.groups, self.role)
        return super().step()


def lose_rollout(tiny: Path, folder: Path, *here: str) -> dict[str, Any]:
    """The spare node replaces the lost one."""
    Losing.lost_at.clear()
    run(load_config(overrides(tiny, folder, *PPO_POOLS, *SHORT, *here)), LosesRollout)
    return {"pids": LosesRollout.pids, "nodes": LosesRollout.nodes}


class Waiting(recovery.Restarts):
    """Starts a node while the run waits for one; only the main thread can start a node."""

    def _pause(self, seconds: float) -> None:
        super()._pause(seconds)
        if seconds == recovery.LOOK_AGAIN_S and len(Losing.nodes) < 2:
            Losing.add_node()


def lose_role(folder: Path, role: str, restarts_class: type, *here: str) -> dict[str, Any]:
    """Run two pools on two nodes, without a spare node."""
    Losing.lost_at.clear()
    LosesRole.role, LosesRole.pids, launch.Restarts = role, [], restarts_class  # type: ignore[misc]
    settings = (f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={STEPS}")
    more = ("placement=split", "trainer.logger=[]", "trainer.save_freq=2", *settings, *here)
    report: dict[str, Any] = {}
    try:
        run(load_config(more, REGRESSION), LosesRole)
    except InsufficientResourcesError as error:
        report = {"error": str(error), "seconds": time.monotonic() - Losing.lost_at[0]}
    return report | {"pids": LosesRole.pids}


@contextmanager
def losing_cluster(num_nodes: int, folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield settings for a new cluster, with a process per node; runs log into `folder`/log."""
    Losing.cluster = cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    for _ in range(num_nodes):
        Losing.add_node()
    folder.mkdir(parents=True)
    log = logging.FileHandler(folder / "log")
    for package in ("trainer", "verl_like"):
        logging.getLogger(package).addHandler(log)
    try:
        yield (
            *("trainer.backend=ray", f"ray.address={cluster.address}", "trainer.device=cpu"),
            "trainer.n_gpus_per_node=1",
        )
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(tiny: Path, folder: Path) -> dict[str, Any]:
    """Run on one cluster, which has one node less after each run that gets no new node."""
    bounded = f"timeouts.placement_s={PLACEMENT_S}"
    with losing_cluster(3, folder) as settings:
        here = (*settings, "trainer.nnodes=2")
        two_nodes = on_two_nodes(tiny, folder / "two_nodes", Losing.cluster, Losing.nodes)
        Losing.add_node()
        return {
            "two_nodes": two_nodes,
            "spare": lose_rollout(tiny, folder / "spare", *here),
            "again": lose_role(folder / "again", "teacher", Waiting, *here),
            "none": lose_role(folder / "none", "student", recovery.Restarts, *here, bounded),
            "log": (folder / "log").read_text(),
        }


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    ask_for_forks(patch)
    patch.setattr(recovery, "FIRST_WAIT_S", 0.01)
    tell(main(Path(sys.argv[1]), Path(sys.argv[2])))
