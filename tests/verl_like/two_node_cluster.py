"""A cluster that loses a node, and one low on memory.

`backends/ray/test_ray_backend` runs this in a separate process.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
from ray._private.utils import get_system_memory, get_used_memory
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from tests.programs import tell
from tests.verl_like.sample_workers import Adder, Faulty
from tests.waiting import wait_until_ended
from verl_like import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    gather,
)
from verl_like.backends.ray import cluster_nodes, connect
from verl_like.backends.ray.cluster import node_failure_cause
from verl_like.calls.deadlines import Deadlines
from verl_like.errors import PlacementError, WorkerDiedError

QUICK = Deadlines(start_s=180, call_s=60, grace_s=2)


def take_all_memory(cluster: Cluster, log_dir: str) -> dict[str, Any]:
    """Return the error of a worker that Ray kills for taking 3 GiB more memory."""
    threshold = (get_used_memory() + 3 * 2**30) / get_system_memory()
    os.environ["RAY_memory_usage_threshold"] = str(threshold)
    os.environ["RAY_memory_monitor_refresh_ms"] = "100"
    cluster.add_node(num_cpus=1)
    pool = RayResourcePool([1], cpus_per_process=1.0, deadlines=QUICK)
    group = RayWorkerGroup(
        pool, RayClassWithInitArgs(Faulty), name_prefix="greedy", log_dir=log_dir
    )
    with ThreadPoolExecutor(1) as thread:
        killed = thread.submit(end_of, group.transport.started[0].pid)
        greedy, queued = group.takes_memory(6144), group.sleeps(0.0)
        with pytest.raises(WorkerDiedError) as raised:
            gather(greedy, queued)
        known = time.monotonic()
    error = raised.value
    noticed_s = known - killed.result()
    return {"starved": str(error), "notes": error.__notes__, "noticed_s": noticed_s}


def end_of(pid: int) -> float:
    """Return the time at which that process ended."""
    wait_until_ended(pid)
    return time.monotonic()


def hold_custom_resources() -> dict[str, Any]:
    """Return what a pool with a resource of the second node reserves while a worker runs there."""
    pool = RayResourcePool([1], cpus_per_process=0.5, resources={"accel": 2}, deadlines=QUICK)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Adder))
    row = next(row for row in placement_group_table().values() if pool.name in row["name"])
    node = next(node for node in cluster_nodes() if node.resources)
    group.shutdown()
    pool.release()
    on_its_node = set(row["bundles_to_node_id"].values()) == {node.key}
    placement = {"there": on_its_node, "uses_loopback": group.transport.processes[0].one_node}
    return {"bundles": row["bundles"], "node": dict(node.resources or {}), **placement}


def main(log_dir: str) -> None:
    facts: dict[str, Any] = {}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    second = cluster.add_node(num_cpus=2, resources={"accel": 3})
    connect(address=cluster.address, runtime_env={"env_vars": {"MINE": "from runtime_env"}})
    facts["slots"] = sorted(node.devices for node in cluster_nodes())
    facts["errors"] = []
    for counts in ([2, 2], [3]):
        try:
            RayResourcePool(counts, cpus_per_process=1.0).bundles()
        except PlacementError as error:
            facts["errors"].append(str(error))
    facts["custom"] = hold_custom_resources()
    pool = RayResourcePool([1, 2], cpus_per_process=1.0, deadlines=QUICK)
    roles = {"adder": RayClassWithInitArgs(Adder), "faulty": RayClassWithInitArgs(Faulty)}
    fused = RayWorkerGroup(pool, create_colocated_worker_cls(roles), log_dir=log_dir)
    groups = fused.spawn(roles)
    facts["ranks"] = groups["adder"].allreduce()
    facts["environment"] = groups["adder"].variable("MINE")
    facts["local_ranks"] = groups["adder"].variable("LOCAL_RANK")
    nodes = [fused.transport._nodes[rank] for rank in range(3)]
    facts["nodes"] = [nodes.index(node) for node in nodes]
    future = groups["faulty"].sleeps(30.0)
    time.sleep(0.5)
    cluster.remove_node(second, allow_graceful=False)
    began = time.monotonic()
    try:
        future.get()
    except WorkerDiedError as error:
        facts["died"] = "\n".join([str(error), *getattr(error, "__notes__", [])])
    facts["seconds"] = time.monotonic() - began
    facts["node_failure_cause"] = [node_failure_cause(node) for node in nodes]
    fused.shutdown()
    facts |= take_all_memory(cluster, log_dir)
    tell(facts)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
