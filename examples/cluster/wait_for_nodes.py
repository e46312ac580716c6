"""Wait until a Ray cluster has all its nodes: `wait_for_nodes.py ADDRESS NUMBER SECONDS`."""

from __future__ import annotations

import sys
import time

import ray


def num_nodes(address: str) -> int:
    """Return the number of nodes that have joined; 0 while the head node does not respond."""
    try:
        ray.init(address, log_to_driver=False, configure_logging=False, ignore_reinit_error=True)
    except ConnectionError:
        return 0
    return sum(node["Alive"] for node in ray.nodes())


def wait(address: str, number: int, seconds: float) -> None:
    """Return when all nodes have joined; exit with a message after `seconds`."""
    until = time.monotonic() + seconds
    while (joined := num_nodes(address)) < number:
        if time.monotonic() > until:
            sys.exit(
                f"{joined} of {number} nodes have joined Ray at {address} within {seconds:g} s: "
                "read the output of their `ray start` above, and check whether they reach this "
                "address. To wait longer, set WAIT_S=<seconds>."
            )
        time.sleep(1)


if __name__ == "__main__":
    wait(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
