"""Run a function on several ranks from a test.

    results = run(2, function, *args)      # function(*args) in each process, results in rank order

The ranks are processes forked from a server, which has loaded the modules that `tests/conftest.py`
names. The function must be at module level; arguments and results are pickled. In
it, a `Worker` finds its rank, its world size and the rendezvous store in the environment, as under
torchrun. `kept_ranks` does the same in processes that stay.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.forked import Descriptors


def run(
    world: int, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0
) -> list[Any]:
    """Return the results of `function(*args)` by rank; a failed or late rank ends all."""
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = pickle.dumps((function, args))
    pipes, processes = [], []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(rank, world, store.port, call, theirs, Descriptors()),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return collect(pipes, time.monotonic() + deadline_s)
    finally:
        for process in processes:
            process.join(timeout=0.2)
            process.kill()
        for pipe in pipes:
            pipe.close()


def collect(pipes: list[Connection], deadline: float) -> list[Any]:
    """Return the answers from the pipes, in order."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(
                f"ranks {[r for r in range(len(pipes)) if r not in results]} passed the deadline"
            )
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                good, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                good, value = False, "the process ended without a result"
            if not good:
                raise RuntimeError(f"rank {rank} of {len(pipes)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _child(rank: int, world: int, port: int, call: bytes, pipe: Connection, _output: None) -> None:
    become_rank(rank, world, port)
    pipe.send_bytes(answer(call))
    leave_groups()


def become_rank(rank: int, world: int, port: int) -> None:
    """Make a `Worker` of this process a rank."""
    import torch

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="FSDP2")


def answer(call: bytes) -> bytes:
    """Return whether the function succeeded, and its result, or the error as text."""
    try:
        function, args = pickle.loads(call)
        result = True, function(*args)
    except BaseException:  # noqa: BLE001 - the edge of the process: the test gets it as text
        result = False, traceback.format_exc()
    return pickle.dumps(result)


def leave_groups() -> None:
    """Leave all process groups."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
