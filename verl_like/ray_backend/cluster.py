"""Joining or starting a Ray cluster, and what its nodes have. Called by `pools` and by `trainer.roles`."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any

import ray

from verl_like.resources import Node

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def connect(
    address: str | None = None, namespace: str | None = None, runtime_env: dict[str, Any] | None = None, **options: Any
) -> None:
    """Join a Ray cluster, or start one on this machine, unless this process is connected already.

    Workers get one thread each.
    """
    if ray.is_initialized():
        return
    env = dict(runtime_env or {})
    if address is not None:
        env["env_vars"] = {**ONE_THREAD, **env.get("env_vars", {})}
    else:
        options = {"include_dashboard": False, **options}
    with _environment({} if address else ONE_THREAD):
        ray.init(
            address=address,
            namespace=namespace,
            runtime_env=env or None,
            log_to_driver=True,
            configure_logging=False,
            **options,
        )


@contextmanager
def _environment(values: dict[str, str]) -> Any:
    """Variables that processes started meanwhile inherit; a value the user set is kept."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def cluster_nodes(slots_per_node: int | None = None, use_gpu: bool = True) -> list[Node]:
    """The living nodes, by address.

    With their GPUs, or (where there are none) with that many CPU slots, or one slot per CPU.
    """
    nodes = []
    for node in sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeManagerAddress"], n["NodeID"])):
        have = node["Resources"]
        gpus, cpus = int(have.get("GPU", 0)) if use_gpu else 0, float(have.get("CPU", 0.0))
        devices = gpus or (int(cpus) if slots_per_node is None else slots_per_node)
        nodes.append(Node(node["NodeManagerAddress"], devices, cpus, "GPU" if gpus else "CPU slot", node["NodeID"]))
    return nodes


def free_resources() -> str:
    """What the cluster could give right now, in words."""
    free = ray.available_resources()
    return amounts({name: free.get(name, 0) for name in ("CPU", "GPU") if name in ray.cluster_resources()})


def amounts(resources: dict[str, float]) -> str:
    """Resources in words: `2 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
