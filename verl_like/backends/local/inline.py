"""Calls in the caller's own process and thread, for pools of one process.

`breakpoint()` works in their workers. A call runs when it is made; its future keeps the result or
the error. Calls of several threads take turns, whichever inline group they are for, because they
share the process's random state and environment. A call past the queue runs in a thread of its own,
next to the others.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from verl_like.backends.local.references import Done, resolve, wait_for_any
from verl_like.batch.protocol import DataProto
from verl_like.calls.diagnose import Deadlines
from verl_like.calls.future import wait_for_start
from verl_like.calls.messages import Call, Pending
from verl_like.calls.transport import Transport
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
        """Runs the call now; one past the queue may last, as a checkpoint's writing does."""
        isolated = copy.deepcopy(call)
        if call.past_queue:
            payload, header = Future[Any](), Future[Any]()
            args = isolated, payload, header
            threading.Thread(target=self._call_beside, args=args, daemon=True).start()
            return Pending(rank, payload, header, call.role)
        with _one_call:
            value, about = self.host.call(isolated, [resolve(part) for part in parts])
        return Pending(rank, Done(_own(value)), Done(about), call.role)

    def _call_beside(self, call: Call, payload: Future[Any], header: Future[Any]) -> None:
        try:
            value, about = self.host.call(call, ())
        except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
            payload.set_exception(error)
            header.set_exception(error)
        else:
            payload.set_result(_own(value))
            header.set_result(about)

    def construct_again(self) -> None:
        """Construct the roles anew in the caller's thread."""
        with _one_call:
            header = self.host.construct_again()
        self.started = wait_for_start(self, [Done(header)])

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """All but calls past the queue are there."""
        return wait_for_any(references, seconds)

    def fetch(self, reference: Any) -> Any:
        """The value behind the reference."""
        return resolve(reference)

    def stacks(self, seconds: float) -> dict[int, str]:
        """The caller's own stack is where it waits."""
        return {0: self.host.stacks()}

    def place(self, rank: int) -> str:
        """The caller's thread, in words."""
        return "in the caller's thread"

    def shutdown(self) -> None:
        """Close the roles' logs and stop their event loop; there is no process to end."""
        self.host.close()


def _own(value: Any) -> Any:
    """A copy for the caller."""
    return value.writable_copy() if isinstance(value, DataProto) else copy.deepcopy(value)
