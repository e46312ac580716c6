"""Fork Ray's worker processes in tests instead of starting them.

The daemon of a cluster that is started here runs `tests/fork_client.py` for a worker, which asks
the server of `tests/fork_server.py` for a fork.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests import fork_client


def ask_for_forks(patch: pytest.MonkeyPatch) -> None:
    """Let clusters that this process starts fork their workers, in tests with a server."""
    from ray._private.node import Node

    start_raylet = Node.start_raylet

    def start_with_forks(node: Any, *args: Any, **options: Any) -> None:
        node._ray_params.worker_path = fork_client.__file__
        start_raylet(node, *args, **options)

    if fork_client.ADDRESS in os.environ:
        patch.setattr(Node, "start_raylet", start_with_forks)
