"""Whether the head and the nodes of a cluster still listen.

Without its head (the GCS) a driver waits for a minute and is then aborted, and the cluster may take
half a minute to declare a node dead.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import ray

EVERY_S = 1.0
"""An address is tried at most once in this time."""
NUM_TRIES = 3
"""So often in a row nobody has answered where somebody is gone."""


class ClusterProbe:
    """What of a cluster does not answer any more."""

    def __init__(self, every_s: float | None = None) -> None:
        """What is where can be asked only while the head lives."""
        self._every_s = EVERY_S if every_s is None else every_s
        self._nodes: dict[str, dict[str, Any]] = {node["NodeID"]: node for node in ray.nodes()}
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head = host, int(port)
        self._tried: dict[tuple[str, int], float] = {}
        self._silent: dict[tuple[str, int], int] = {}
        self._trying = threading.Lock()

    def address(self, node_id: str) -> str:
        """The network address of a node."""
        return str(self._nodes[node_id]["NodeManagerAddress"])

    def why_node_gone(self, node_id: str) -> str | None:
        """Why nothing on that node can ever answer; None while it lives."""
        address, port = self.address(node_id), self._nodes[node_id]["NodeManagerPort"]
        if not self._is_gone(address, port):
            return None
        return (
            f"its node {address} ({node_id[:8]}) is gone: no Ray daemon answers at "
            f"{address}:{port}."
        )

    def why_head_gone(self) -> str | None:
        """Why no worker of the cluster will be heard of again; None while it lives."""
        if not self._is_gone(*self._head):
            return None
        return (
            f"the head of the Ray cluster is gone: no GCS listens at {self._head[0]}:"
            f"{self._head[1]}. Start the cluster anew; the same command then goes on from the last "
            "checkpoint."
        )

    def why_unusable(self, node_id: str) -> str | None:
        """Why no worker can be started on that node now; None while it lives."""
        node = self._nodes.get(node_id)
        if node is None or not node["Alive"]:
            where = self.address(node_id) if node else "of this pool"
            return f"its node {where} ({node_id[:8]}) is gone: Ray has declared it dead."
        return next(filter(None, (self.why_node_gone(node_id) for _ in range(NUM_TRIES))), None)

    def _is_gone(self, address: str, port: int) -> bool:
        place = address, port
        with self._trying:  # threads that wait for the same silence count it once
            if time.monotonic() - self._tried.get(place, -self._every_s) >= self._every_s:
                self._tried[place] = time.monotonic()
                self._silent[place] = 0 if _answers(place) else self._silent.get(place, 0) + 1
            return self._silent[place] >= NUM_TRIES


def why_gone(node_id: str) -> str | None:
    """Why no worker can be started on that node; None while it lives."""
    return ClusterProbe(every_s=0.0).why_unusable(node_id)


def _answers(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=1.0).close()
    except OSError:
        return False
    return True
