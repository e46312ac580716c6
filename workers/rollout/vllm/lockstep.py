"""Run one vLLM on several ranks of the rollout, each with its shard of the model on its device.

vLLM starts no processes (its `external_launcher`). Every rank has its own scheduler, and all
schedulers must do the same. The first rank leads: it announces every call that affects its
scheduler to the other ranks. They follow until the role's call ends:

    with engine.leading():                  # on the first rank, in a role's call
        engine.submit(samples, sampling)    # announces the requests to add ...
        engine.collect()                    # ... and each step
    engine.follow()                         # on the other ranks, in the same call

Weights need no announcement, because every rank receives its own weights at the same time.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from verl_like.process.info import environment

if TYPE_CHECKING:
    from verl_like.process.worker import Worker

LONGEST = timedelta(days=1)
"""Time that ranks wait for the first rank, whose environments have their own time limits."""


class Lockstep:
    """The communication between the ranks of one engine."""

    def __init__(self, worker: Worker, size: int) -> None:
        """Group `size` consecutive ranks into an engine; every rank must call this."""
        lines = [[*range(first, first + size)] for first in range(0, worker.world_size, size)]
        group, _ = dist.new_subgroups_by_enumeration(lines, timeout=LONGEST, backend="gloo")
        self.size, self._group = size, group
        self._first = worker.rank - worker.rank % size
        self.leads = worker.rank == self._first
        self._rank, self._device = worker.rank, worker.device.index or 0
        self._name = self._broadcast(uuid.uuid4().hex)

    @property
    def executor(self) -> type:
        """vLLM's executor for ranks that another program has launched."""
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        # vLLM's CPU worker names its shared memory by the text after the last colon; nothing else
        # reads this init method, because the process group is already open
        method = f"env://:{self._name}"

        class Launched(ExecutorWithExternalLauncher):  # type: ignore[misc]
            def _distributed_args(self) -> tuple[str, int, int]:
                return (method, *super()._distributed_args()[1:])

        return Launched

    def launched(self) -> AbstractContextManager[None]:
        """Context with the environment variables of vLLM's launcher."""
        return environment({"RANK": str(self._rank), "LOCAL_RANK": str(self._device)})

    def tell(self, method: str, args: tuple[Any, ...]) -> None:
        """Make the other ranks call this method of their vLLM."""
        self._broadcast((method, args))

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Context of a call on the first rank; at its end, the other ranks stop following."""
        try:
            yield
        finally:
            self._broadcast(None)

    def follow(self, vllm: Any) -> None:
        """Repeat the first rank's calls until its role's call ends.

        Then raise the first error, if there was one.
        """
        failure: Exception | None = None
        while (received := self._broadcast(None)) is not None:
            method, args = received
            try:
                getattr(vllm, method)(*args)
            except Exception as error:  # noqa: BLE001 - raised at the end of the call
                failure = failure or error
        if failure is not None:
            raise failure

    def gathered(self, local: Any) -> list[Any]:
        """Return the objects of all ranks; every rank must call this."""
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, local, group=self._group)
        return objects

    def _broadcast(self, local: Any) -> Any:
        """Return the first rank's object; every rank must call this."""
        objects = [local]
        dist.broadcast_object_list(objects, src=self._first, group=self._group)
        return objects[0]


def on_all_ranks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method that affects vLLM's scheduler; all ranks repeat the first rank's calls."""

    @functools.wraps(method)
    def call(vllm: Any, *args: Any) -> Any:
        if vllm.lockstep is not None and vllm.lockstep.leads:
            vllm.lockstep.tell(method.__name__, args)
        return method(vllm, *args)

    return call
