"""The facts of a process that are known before it starts, such as its rank and its log.

This is the ground floor of `verl_like`: it imports only the standard library.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path


def new_secret() -> str:
    """Return a random secret of 128 bits."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class ProcessFacts:
    """One process of a group. `role` and `master` are filled in inside the process."""

    name: str = "worker"
    """The group: its role, or its roles joined by "+"."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The process's rank among the processes of the group on its node."""
    local_world_size: int = 1
    """Processes of the group on its node."""
    device_kind: str = "cpu"
    device_index: int | None = None
    """Index of the process's GPU among the GPUs that it sees; set inside the process, None on
    CPUs."""
    seed: int = 0
    log_dir: str | None = None
    rendezvous_s: float = 300.0
    call_s: float = 7200.0
    collective_s: float = 1800.0
    one_node: bool = True
    """True if all processes that this process may talk to, other pools included, are on its
    node."""
    secret: str = field(default="", repr=False)
    """Secret of the group's ranks, which sign with it their values in the group's store."""
    role: str = "worker"
    """The role that an instance plays in this process."""
    master: tuple[str, int] | None = None
    """Host and port of the store in which the ranks meet."""

    def log_path(self, role: str | None = None) -> Path | None:
        """Return the log file of a role in this process, by default of the first role."""
        if self.log_dir is None:
            return None
        return Path(self.log_dir) / f"{(role or self.name).split('+')[0]}-{self.rank}.log"

    def describe_log(self, role: str | None = None) -> str:
        """Return the name of the log for a message."""
        path = self.log_path(role)
        return f"log {path}" if path else ""
