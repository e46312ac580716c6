"""Calls to child processes of this one, over a pipe each.

The other end of the pipe is `verl_like.backends.local.child`. A call may refer to the result of
another child: the thread that sends a child its calls waits for it first, so no worker ever waits
inside a call for its arguments.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from verl_like.backends.local.references import resolve, wait_for_any
from verl_like.backends.rpc import ProcessTransport, Requests
from verl_like.calls.diagnose import Deadlines
from verl_like.calls.future import wait_for_start
from verl_like.calls.messages import Call, Pending
from verl_like.errors import WorkerError
from verl_like.process.child import start_child
from verl_like.process.environment import ONE_THREAD
from verl_like.process.facts import ProcessFacts
from verl_like.process.host import Recipes


class _Child(Requests):
    """The process of one rank, with a thread that sends its calls, in turn.

    That thread waits for what a call refers to.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], connection: Connection):
        self.process = process
        self._outgoing: queue.Queue[tuple[int, str, tuple[Any, ...]] | None] = queue.Queue()
        super().__init__(connection, self._why_dead)
        threading.Thread(target=self._send_in_turn, name=f"{name} pipe", daemon=True).start()

    def ask_in_turn(self, method: str, *args: Any, num_answers: int = 1) -> tuple[Future[Any], ...]:
        """Ask the host, after what it was asked before."""
        number, futures = self.expect(num_answers)
        self._outgoing.put((number, method, args))
        return futures

    def _send_in_turn(self) -> None:
        while (message := self._outgoing.get()) is not None:
            number, method, args = message
            try:
                self.send(number, method, resolve(args))
            except WorkerError as error:  # of a call that this one refers to
                self.settle(number, error)

    def _why_dead(self) -> str:
        how = _how_it_ended(self.process.wait())
        self._outgoing.put(None)
        return f"the worker process (pid {self.process.pid}) {how}."


def _how_it_ended(code: int) -> str:
    """A process's exit code in words."""
    if code >= 0:
        return f"exited with status {code}"
    how = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += " (by hand, or by the kernel when memory ran out)"
    return how


class ChildTransport(ProcessTransport):
    """One child process per rank of the pool."""

    kind = "local"

    def __init__(
        self,
        recipes: Recipes,
        facts: Sequence[ProcessFacts],
        deadlines: Deadlines,
        env: Mapping[str, str],
        master_port: int,
    ):
        """Starts the processes, lets rank 0 bind the rendezvous, constructs the roles."""
        super().__init__(facts, deadlines)
        pickled = cloudpickle.dumps(recipes)
        program, variables = "verl_like.backends.local.child", {**ONE_THREAD, **env}
        children = [
            _Child(f"{fact.name} rank {fact.rank}", *start_child(program, env=variables))
            for fact in facts
        ]
        self.requests = self.children = children
        try:
            for child, fact in zip(children, facts, strict=True):
                child.ask_in_turn("host", pickled, fact)
            master = children[0].ask_in_turn("open_store", "127.0.0.1", master_port)[0]
            starting = [child.ask_in_turn("start", master)[0] for child in children]
            self.started = wait_for_start(self, starting)
        except BaseException:
            self.shutdown()
            raise

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue the call for the child's pipe."""
        if call.past_queue:
            return self.call_past_queue(rank, call)
        child, given = self.children[rank], list(parts)
        payload, header = child.ask_in_turn("call", call, given, num_answers=2)
        return Pending(rank, payload, header, call.role)

    def construct_again(self) -> None:
        """Asked of every child in its turn."""
        asked = [child.ask_in_turn("construct_again")[0] for child in self.children]
        self.started = wait_for_start(self, asked)

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """The references that are answered or have failed."""
        return wait_for_any(references, seconds)

    def fetch(self, reference: Any) -> Any:
        """The value behind the reference."""
        return resolve(reference)

    def pid_here(self, rank: int) -> int:
        """The process id of the rank's child."""
        return self.children[rank].process.pid

    def place(self, rank: int) -> str:
        """The child's process id."""
        return f"pid {self.children[rank].process.pid}"

    def shutdown(self) -> None:
        """Kill the children: they have nothing to finish, and one that is stopped hears no more."""
        for child in self.children:
            child.process.kill()
        deadline = time.monotonic() + 5.0
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                child.process.wait(max(0.1, deadline - time.monotonic()))
