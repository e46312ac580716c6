"""Run a function on several ranks from a test: processes forked from a server, which has loaded
what conftest.py names.

    results = run(2, function, *args)      # function(*args) in each process, results in rank order

The function must stand at the top of its test file; arguments and results are pickled. In it, a
`Worker` finds its rank, its world size and the rendezvous store in the environment, as under
torchrun.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


def run(
    world: int, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0
) -> list[Any]:
    """The results of `function(*args)` on `world` ranks; a rank that fails or is late ends them
    all.
    """
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = (function.__code__.co_filename, function.__name__, pickle.dumps(args))
    pipes, processes = [], []
    try:
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(rank, world, store.port, call, theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return _collect(pipes, time.monotonic() + deadline_s)
    finally:
        for process in processes:
            process.join(timeout=0.2)
            process.kill()
        for pipe in pipes:
            pipe.close()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
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


def _child(
    rank: int, world: int, port: int, call: tuple[str, str, bytes], pipe: Connection
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="FSDP2")
    try:
        path, name, arguments = call
        sys.path.insert(0, os.path.dirname(path))
        spec = importlib.util.spec_from_file_location("function_of_a_test", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result = True, getattr(module, name)(*pickle.loads(arguments))
    except BaseException:  # noqa: BLE001 - the edge of the process: whatever it is goes to the test as text
        result = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
