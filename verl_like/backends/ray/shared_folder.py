"""A check, before processes start, that every node of a placement sees the driver's files."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_like.errors import PlacementError
from verl_like.placement.pools import Node

ANSWER_S = 60.0
"""Time that a node has to answer whether it sees a file."""


def require_shared_folder(folder: Path, nodes: Iterable[Node]) -> None:
    """Raise if some node does not see this folder, because its workers' files would be lost."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{uuid.uuid4().hex}"
    probe.touch()
    try:
        blind = nodes_without_path(probe, nodes)
    finally:
        probe.unlink()
    if blind:
        raise PlacementError(
            f"trainer.default_local_dir={folder}: a file written there by the driver is not seen "
            f"on {', '.join(blind)}. Logs and checkpoints of the workers there would be lost; "
            "give a folder on a file system that all nodes share, or keep the pools on nodes "
            "that see it."
        )


def nodes_without_path(path: Path, nodes: Iterable[Node]) -> list[str]:
    """Return the names of the nodes that have no such path, or do not answer within a minute."""
    node_of_answer = {}
    for key, node in {node.key: node for node in nodes}.items():
        on_the_node = NodeAffinitySchedulingStrategy(key, soft=False)
        node_of_answer[_exists.options(scheduling_strategy=on_the_node).remote(str(path))] = node

    missing, until = [], time.monotonic() + ANSWER_S
    for answer, node in node_of_answer.items():
        try:
            sees = ray.get(answer, timeout=max(until - time.monotonic(), 0.0))
        except RayError:  # it cannot answer, or not in time
            sees = False
        if not sees:
            missing.append(f"{node.name} ({node.key[:8]})")
    return missing


@ray.remote(num_cpus=0)
def _exists(path: str) -> bool:
    return os.path.exists(path)
