"""One vLLM over several of our ranks, each with its share of the model on its own device.

vLLM starts no process (its `external_launcher`): every rank has a scheduler of its own, and all of
them must do the same. The first rank leads. Whatever moves its scheduler it tells the others
first; they follow until it says that a call has ended:

    with engine.leading():                  # the first rank, in a role's call
        engine.submit(samples, sampling)    # tells the others what to add ...
        engine.take()                       # ... and each step
    engine.follow()                         # the others, in the same call

Weights need no word: every rank is given its own, and loads them at the same time.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from verl_like.process.environment import environment

if TYPE_CHECKING:
    from verl_like.process.worker import Worker

LONGEST = timedelta(days=1)
"""The others wait while the first rank's environments are at work, which have limits."""


class Lockstep:
    """The ranks of one engine, as each of them knows them."""

    def __init__(self, worker: Worker, size: int) -> None:
        """`size` consecutive ranks have an engine; collective over all."""
        lines = [[*range(first, first + size)] for first in range(0, worker.world_size, size)]
        group, _ = dist.new_subgroups_by_enumeration(lines, timeout=LONGEST, backend="gloo")
        self.size, self._group = size, group
        self._first = worker.rank - worker.rank % size
        self.leads = worker.rank == self._first
        self._rank, self._device = worker.rank, worker.device.index or 0
        self._name = self._broadcast(uuid.uuid4().hex)

    @property
    def executor(self) -> type:
        """vLLM's for ranks that others have launched."""
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        # a worker on CPUs names its shared memory by what follows the last colon; nothing else
        # reads the method of opening a process group that is open
        method = f"env://:{self._name}"

        class Launched(ExecutorWithExternalLauncher):  # type: ignore[misc]
            def _distributed_args(self) -> tuple[str, int, int]:
                return (method, *super()._distributed_args()[1:])

        return Launched

    def launched(self) -> AbstractContextManager[None]:
        """Within, vLLM finds in the environment what a launcher of its would have said."""
        return environment({"RANK": str(self._rank), "LOCAL_RANK": str(self._device)})

    def tell(self, method: str, args: tuple[Any, ...]) -> None:
        """Have the other ranks call this method of their vLLM."""
        self._broadcast((method, args))

    @contextmanager
    def leading(self) -> Iterator[None]:
        """A call of the first rank; the others are told when it has ended."""
        try:
            yield
        finally:
            self._broadcast(None)

    def follow(self, vllm: Any) -> None:
        """Call what the first rank calls until its role's call ends; then raise what failed."""
        failure: Exception | None = None
        while (told := self._broadcast(None)) is not None:
            method, args = told
            try:
                getattr(vllm, method)(*args)
            except Exception as error:  # noqa: BLE001 - raised when the first rank has ended its call
                failure = failure or error
        if failure is not None:
            raise failure

    def gathered(self, own: Any) -> list[Any]:
        """What every rank has."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._group)
        return found

    def _broadcast(self, own: Any) -> Any:
        """What the first rank says."""
        said = [own]
        dist.broadcast_object_list(said, src=self._first, group=self._group)
        return said[0]


def on_all_ranks(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that moves vLLM's scheduler: when the first rank calls it, all ranks do."""

    @functools.wraps(method)
    def call(vllm: Any, *args: Any) -> Any:
        if vllm.lockstep is not None and vllm.lockstep.leads:
            vllm.lockstep.tell(method.__name__, args)
        return method(vllm, *args)

    return call


def in_step(method: Callable[..., Any]) -> Callable[..., Any]:
    """A role's method that generates: an engine's first rank runs it, the others follow.

    The others return None. An engine of one rank leads.
    """

    @functools.wraps(method)
    def call(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if worker.engine.follows:
            worker.engine.follow()
            return None
        with worker.engine.leading():
            return method(worker, *args, **kwargs)

    return call
