"""Whether the processes of a cluster still listen: workers that nobody calls, and the head.

Ray says of a call that its worker died, but nothing of an idle one; and without its head (the GCS)
a driver waits for a minute and is then aborted.
"""

from __future__ import annotations

import socket
import threading
import time

import ray

EVERY_S = 1.0
"""An address is tried at most once in this time."""
REFUSALS_OF_A_HEAD = 3
"""A head may be started anew."""


class ListeningProbe:
    """How often in a row a connection to an address was refused: nobody listens there."""

    def __init__(self) -> None:
        """Nothing has been tried."""
        self._tried: dict[tuple[str, int], float] = {}
        self._refused: dict[tuple[str, int], int] = {}
        self._trying = threading.Lock()

    def refusals(self, address: str, port: int) -> int:
        """Those of now; a host that does not answer at all refuses nothing."""
        place = address, port
        with self._trying:
            if time.monotonic() - self._tried.get(place, -EVERY_S) >= EVERY_S:
                self._tried[place] = time.monotonic()
                self._refused[place] = self._refused.get(place, 0) + 1 if _refuses(place) else 0
            return self._refused[place]


class ClusterProbe:
    """What of a cluster does not listen any more."""

    def __init__(self) -> None:
        """Nothing has been tried; where the head is can be asked only while it lives."""
        self._listening = ListeningProbe()
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head = host, int(port)

    def why_worker_gone(self, address: str, port: int) -> str | None:
        """Why a worker can never answer, by the port that it listens on as long as it lives."""
        if self._listening.refusals(address, port) == 0:
            return None
        return "the worker process is gone: it ended while nobody called it (its log may say why)."

    def why_head_gone(self) -> str | None:
        """Why no worker of the cluster will be heard of again."""
        if self._listening.refusals(*self._head) < REFUSALS_OF_A_HEAD:
            return None
        return (
            f"the head of the Ray cluster is gone: no GCS listens at {self._head[0]}:"
            f"{self._head[1]}. Start the cluster anew; the same command then goes on from the last "
            "checkpoint."
        )


def _refuses(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
