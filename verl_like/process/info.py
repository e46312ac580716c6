"""Data about a worker process, such as its rank and its log, and its environment variables.

The variables are torchrun's and the number of threads; users must not set those in `PROTECTED`. The
backends start processes with them, and `verl_like.process.host` sets those that are known only
inside the process. All other packages of `verl_like` may import this module.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from verl_like.errors import ConfigError
from verl_like.process.machine import loopback_interface


def new_secret() -> str:
    """Return a random secret of 128 bits."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class ProcessInfo:
    """One process of a group. `role` and `master` are filled in inside the process."""

    name: str = "worker"
    """Name of the group: its role, or its roles joined by "+"."""
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
    threads: int = 1
    """Threads with which torch computes calls of the process on a CPU."""
    log_dir: str | None = None
    rendezvous_s: float = 300.0
    call_s: float = 7200.0
    collective_s: float = 1800.0
    one_node: bool = True
    """True if all processes that this process may talk to, other pools included, are on its
    node."""
    secret: str = field(default="", repr=False)
    """Secret of the group's ranks, with which they sign their values in the group's store."""
    role: str = "worker"
    """The role that an instance plays in this process."""
    master: tuple[str, int] | None = None
    """Host and port of the store in which the ranks meet."""

    def log_path(self, role: str | None = None) -> Path | None:
        """Return the log file of a role in this process, by default of its first role.

        Return None if the group has no `log_dir`.
        """
        if self.log_dir is None:
            return None
        return Path(self.log_dir) / f"{(role or self.name).split('+')[0]}-{self.rank}.log"


OWN_PROCESS = "VERL_LIKE_PROCESS"
"""Environment variable that marks the process of a worker or of a command, not of a notebook."""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    OWN_PROCESS: "1",
}
PROTECTED = (
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "RAY_LOCAL_RANK",
    "RAY_LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "WORLD_SIZE",
)


def torchrun_environment(
    process_info: ProcessInfo, master: tuple[str, int] | None
) -> dict[str, str]:
    """Return the variables that workers for torchrun or verl read.

    `LOCAL_RANK` is the index of the worker's GPU among those it sees, because torch, transformers
    and users pass it to `set_device`; on CPUs it is the rank on the node, as `RAY_LOCAL_RANK`
    always is. `init_process_group()` uses the store of rank 0.
    """
    index = process_info.device_index
    if index is None:
        index = process_info.local_rank
    values: dict[str, object] = {
        "RANK": process_info.rank,
        "WORLD_SIZE": process_info.world_size,
        "LOCAL_RANK": index,
        "LOCAL_WORLD_SIZE": process_info.local_world_size,
        "RAY_LOCAL_RANK": process_info.local_rank,
        "RAY_LOCAL_WORLD_SIZE": process_info.local_world_size,
    }
    if master is not None:
        values |= {"MASTER_ADDR": master[0], "MASTER_PORT": master[1]}
        if master[1]:
            values |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in values.items()}


def loopback_environment(process_info: ProcessInfo) -> dict[str, str]:
    """Return the variable that keeps gloo's sockets on this machine if there is only one node.

    An interface that the user has set stays.
    """
    name = "GLOO_SOCKET_IFNAME"
    is_free = name not in os.environ and process_info.one_node
    return {name: loopback_interface()} if is_free else {}


def checked_worker_env(worker_env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the user's variables for worker processes; raise if the launcher sets one of them."""
    values = {name: str(value) for name, value in (worker_env or {}).items()}
    taken = sorted(set(values) & set(PROTECTED))
    if taken:
        raise ConfigError(
            f"the launcher sets {', '.join(taken)} for every rank. Leave {', '.join(PROTECTED)} "
            "out of worker_env and runtime_env."
        )
    return values


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these variables inside the block, for this process and those that it starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
