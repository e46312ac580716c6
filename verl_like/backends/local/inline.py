"""Calls in the caller's own process and thread: `breakpoint()` in a worker works.

A call runs when it is made; its future keeps the result or the error. Calls of several threads run
in turn, whichever inline group they are for: they share the process's random state and environment.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from verl_like.backends.local.references import Done
from verl_like.batch.protocol import DataProto
from verl_like.calls.answers import wait_for_start
from verl_like.calls.messages import Call, Pending
from verl_like.calls.progress import Progress
from verl_like.calls.transport import Transport
from verl_like.calls.waiting import Deadlines
from verl_like.process.facts import ProcessFacts
from verl_like.process.host import Recipes, WorkerHost
from verl_like.process.worker import Worker

_one_call = threading.RLock()
"""Held by the thread whose call runs; a call within a call is in the same thread."""


class InlineTransport(Transport):
    """One process: the caller's, in the caller's thread.

    Values are copied on the way in and out.
    """

    kind = "local"

    def __init__(
        self,
        recipes: Recipes,
        facts: ProcessFacts,
        deadlines: Deadlines,
        neighbours: dict[str, Worker],
    ):
        """Constructs the roles at once.

        `neighbours` holds the roles of every inline pool: they are siblings.
        """
        super().__init__([facts], deadlines)
        self.process_key = id(neighbours)
        self.host = WorkerHost(recipes, facts, neighbours)
        with _one_call:
            header = self.host.start(None)
        self.started = wait_for_start(self, [Done(header)])

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Runs the call now."""
        isolated = copy.deepcopy(call)
        given = [self.fetch(part) if isinstance(part, Done | Future) else part for part in parts]
        with contextlib.nullcontext() if call.past_queue else _one_call:
            payload, header = self.host.call(isolated, given)
        is_batch = isinstance(payload, DataProto)
        own = payload.writable_copy() if is_batch else copy.deepcopy(payload)
        return Pending(rank, Done(own), Done(header), call.role)

    def construct_again(self) -> None:
        """At once."""
        with _one_call:
            header = self.host.construct_again()
        self.started = wait_for_start(self, [Done(header)])

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Everything is there."""
        return list(references)

    def fetch(self, reference: Any) -> Any:
        """The value."""
        return reference.value if isinstance(reference, Done) else reference.result()

    def stacks(self, seconds: float) -> dict[int, str]:
        """The caller's own stack is where it waits."""
        return {0: self.host.stacks()}

    def progress(self, seconds: float) -> dict[int, Progress]:
        """Of a call that another thread of the driver makes."""
        return {0: self.host.progress()}

    def place(self, rank: int) -> str:
        """Here."""
        return "in the caller's thread"

    def shutdown(self) -> None:
        """Nothing runs between calls; logs are closed."""
        self.host.close()
