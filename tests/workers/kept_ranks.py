"""Run a function on several ranks from a test, in processes that the next test reuses.

    results = run_kept(2, function, *args)      # as `distributed.run`

In each process, torch plans every operation on shards once, which takes two thirds of a short
training of a tiny model. After each function the process leaves its groups, and its environment,
its random state and the settings of our modules are as before. Use `distributed.run` for a function
that measures or limits the memory of its process, ends the process or starts threads.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.forked import Descriptors
from tests.workers.distributed import answer, become_rank, collect, leave_groups

PACKAGES = ("verl_like", "workers")
MAX_KEPT = 4


class Rank:
    """A process that waits for the next function."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        arguments = theirs, Descriptors()
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


_kept: dict[int, Rank] = {}
"""Those that wait, by their numbers as ranks: what torch keeps of a mesh is that rank's."""


def run_kept(
    world: int, function: Callable[..., Any], *args: Any, deadline_s: float = 60.0
) -> list[Any]:
    """Return the results of `function(*args)` by rank; a failed or late rank ends all."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = pickle.dumps((function, args))
    ranks = [_kept.pop(number, None) or Rank() for number in range(world)]
    try:
        for number, rank in enumerate(ranks):
            place = number, world, store.port
            rank.pipe.send((sys.path, place, function.__module__, call))
        results = collect([rank.pipe for rank in ranks], time.monotonic() + deadline_s)
    except BaseException:
        for rank in ranks:
            rank.end()
        raise
    _kept.update(enumerate(ranks[:MAX_KEPT]))
    for rank in ranks[MAX_KEPT:]:
        rank.end()
    return results


def _serve(pipe: Connection, _output: None) -> None:
    while True:
        try:
            path, place, module, call = pipe.recv()
        except EOFError:  # the tests have ended
            return
        sys.path[:] = path
        importlib.import_module(module)  # and what it imports, whose settings are kept
        with process_set_back():
            become_rank(*place)
            answered = answer(call)
        pipe.send_bytes(answered)


@contextmanager
def process_set_back() -> Iterator[None]:
    """Context after which this process is in no group, and as before."""
    import torch

    environment, folder = dict(os.environ), os.getcwd()
    python, numpy, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES]
    settings = [dict(vars(module)) for module in modules]
    try:
        with warnings.catch_warnings():
            yield
    finally:
        leave_groups()
        for module, before in zip(modules, settings, strict=True):
            vars(module).update(before)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(tensors)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
