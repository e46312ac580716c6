"""Environment variables of worker processes: torchrun's, threads, and the protected ones.

The backends start processes with these; `verl_like.process.host` sets the ones that are known only
inside the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from verl_like.errors import ConfigError
from verl_like.process.facts import ProcessFacts

OWN_PROCESS = "VERL_LIKE_PROCESS"
"""The variable that marks the process of a worker or of a command, and no notebook."""
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


def torchrun_environment(facts: ProcessFacts, master: tuple[str, int] | None) -> dict[str, str]:
    """Return the variables that workers written for torchrun or for verl read.

    `LOCAL_RANK` is the index of the worker's GPU among those it sees, because torch, transformers
    and users pass it to `set_device`; on CPUs it is the rank on the node, as `RAY_LOCAL_RANK`
    always is. `init_process_group()` meets in the store that rank 0 holds.
    """
    values: dict[str, object] = {
        "RANK": facts.rank,
        "WORLD_SIZE": facts.world_size,
        "LOCAL_RANK": facts.local_rank if facts.device_index is None else facts.device_index,
        "LOCAL_WORLD_SIZE": facts.local_world_size,
        "RAY_LOCAL_RANK": facts.local_rank,
        "RAY_LOCAL_WORLD_SIZE": facts.local_world_size,
    }
    if master is not None:
        values |= {"MASTER_ADDR": master[0], "MASTER_PORT": master[1]}
        if master[1]:
            values |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in values.items()}


def loopback_environment(facts: ProcessFacts) -> dict[str, str]:
    """Return the variable that keeps gloo's sockets on this machine if there is only one node.

    An interface that the user has set stays.
    """
    name = "GLOO_SOCKET_IFNAME"
    return {} if name in os.environ or not facts.one_node else {name: "lo"}


def checked_worker_env(worker_env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the user's variables for worker processes; raise if the launcher sets one of them."""
    values = {name: str(value) for name, value in (worker_env or {}).items()}
    taken = sorted(set(values) & set(PROTECTED))
    if taken:
        raise ConfigError(
            f"worker_env sets {', '.join(taken)}, which the launcher sets itself for every rank. "
            f"Leave out: {', '.join(PROTECTED)}."
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
