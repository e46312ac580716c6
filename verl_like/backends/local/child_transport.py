"""Calls to child processes of this one, over a pipe each.

Used by `local_backend`; the other end is `verl_like.backends.local.child`.

A message may refer to the result of another child: the thread that writes into a child's pipe waits
for it first, so no worker ever waits inside a call for its arguments.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import cloudpickle

from verl_like.backends.local.child import receive, send
from verl_like.batch.split import regroup_pieces
from verl_like.calls import stacks
from verl_like.calls.transport import Call, Pending, Transport
from verl_like.calls.waiting import Deadlines, wait_for_calls
from verl_like.errors import WorkerDiedError, WorkerError
from verl_like.process.environment import ONE_THREAD
from verl_like.process.host import HostFacts, Recipes


@dataclass(frozen=True)
class Done:
    """A reference to something that is there already."""

    value: Any

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _Child:
    """One child process: a thread that sends (and waits for what a message refers to), a thread
    that receives.
    """

    def __init__(self, name: str, env: Mapping[str, str]):
        ours, theirs = Pipe()
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "verl_like.backends.local.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **ONE_THREAD, **env, "PYTHONPATH": path},
            process_group=0,  # Ctrl-C is for the driver, which ends its children
        )
        theirs.close()
        ours.send(sys.path)
        self.name, self.connection, self.lock, self.sending = (
            name,
            ours,
            threading.Lock(),
            threading.Lock(),
        )
        self.answers: dict[int, tuple[Future[Any], ...]] = {}
        self.outgoing: queue.Queue[tuple[int, str, tuple[Any, ...]] | None] = queue.Queue()
        self.dead: WorkerDiedError | None = None
        self.count = 0
        for target in (self._send, self._receive):
            threading.Thread(target=target, name=f"{name} pipe", daemon=True).start()

    def request(self, method: str, *args: Any, num_answers: int = 1) -> tuple[Future[Any], ...]:
        """Ask the host; one future for each value of the answer.

        What goes past the queue waits for nothing.
        """
        futures = tuple(Future[Any]() for _ in range(num_answers))
        with self.lock:
            self.count += 1
            number = self.count
            self.answers[number] = futures
        if self.dead is not None:
            self._fail_all(self.dead)
        if method in ("stacks", "past_queue"):
            threading.Thread(
                target=self._send_one, args=(number, method, args), daemon=True
            ).start()
        else:
            self.outgoing.put((number, method, args))
        return futures

    def _send(self) -> None:
        while (message := self.outgoing.get()) is not None:
            self._send_one(*message)

    def _send_one(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            send(self.connection, self.sending, number, method, _resolve(args))
        except OSError:
            return  # `_receive` finds out why
        except WorkerError as error:
            self._answer(number, error)
        except Exception as error:  # noqa: BLE001 - a value that cannot be sent belongs to the future of its call
            text = f"{type(error).__name__}: {error}"
            self._answer(
                number, WorkerError(f"the arguments cannot be sent to the worker process: {text}")
            )

    def _receive(self) -> None:
        try:
            while True:
                number, method, load = receive(self.connection)
                self._answer(number, _answer_of(method, load))
        except (EOFError, OSError):
            code = self.process.wait()
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"exited with status {code}"
            )
            if code == -signal.SIGKILL:
                how += " (by hand, or by the kernel when memory ran out)"
            self.dead = WorkerDiedError(f"the worker process (pid {self.process.pid}) {how}.")
            self.outgoing.put(None)
            self._fail_all(self.dead)

    def _answer(self, number: int, value: Any) -> None:
        with self.lock:
            futures = self.answers.pop(number, ())
        for position, future in enumerate(futures):
            if isinstance(value, WorkerError):
                future.set_exception(value)
            else:
                future.set_result(value[position] if len(futures) > 1 else value)

    def _fail_all(self, error: WorkerDiedError) -> None:
        with self.lock:
            left, self.answers = list(self.answers.values()), {}
        for futures in left:
            for future in futures:
                future.set_exception(error)


def _resolve(value: Any) -> Any:
    """References anywhere in a message's lists and tuples, as values; waits for them."""
    if isinstance(value, Future):
        return value.result()
    if isinstance(value, Done):
        return value.value
    if type(value) in (list, tuple):
        return type(value)(map(_resolve, value))
    return value


def _answer_of(method: str, load: Callable[[], Any]) -> Any:
    try:
        content = load()
    except Exception as error:  # noqa: BLE001 - whatever a class does when it is unpickled
        return WorkerError(
            f"the answer of the worker process cannot be read here: {type(error).__name__}: {error}"
        )
    return WorkerError(content) if method == "error" else content


class ChildTransport(Transport):
    """One child process per rank of the pool."""

    kind = "local"

    def __init__(
        self,
        recipes: Recipes,
        facts: Sequence[HostFacts],
        deadlines: Deadlines,
        env: Mapping[str, str],
        master_port: int,
    ):
        """Starts the processes, lets rank 0 bind the rendezvous,
        constructs the roles everywhere.
        """
        super().__init__(facts, deadlines)
        pickled = cloudpickle.dumps(recipes)
        self.children = [_Child(f"{f.name} rank {f.rank}", env) for f in facts]
        try:
            for child, fact in zip(self.children, facts, strict=True):
                child.request("host", pickled, fact)
            master = self.children[0].request("open_store", "127.0.0.1", master_port)[0]
            starting = [child.request("start", master)[0] for child in self.children]
            name = facts[0].name
            calls = [Pending(rank, header, header, name) for rank, header in enumerate(starting)]
            self.started = wait_for_calls(self, f"start of {name}", calls, setting="start_s")
        except BaseException:
            self.shutdown()
            raise

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue the call for the child's pipe."""
        method = "past_queue" if call.past_queue else "call"
        payload, header = self.children[rank].request(method, call, list(parts), num_answers=2)
        return Pending(rank, payload, header, call.role)

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Those that are answered or failed."""
        here = [r for r in references if isinstance(r, Done)]
        left = [r for r in references if not isinstance(r, Done)]
        return here + list(wait_futures(left, 0.0 if here else seconds, FIRST_COMPLETED).done)

    def fetch(self, reference: Any) -> Any:
        """The answer."""
        return _resolve(reference)

    def stacks(self, seconds: float) -> dict[int, str]:
        """Asked of every child past its queue; of one that cannot answer, by signal."""
        asked = {rank: child.request("stacks")[0] for rank, child in enumerate(self.children)}
        wait_futures(asked.values(), seconds)
        found = {
            rank: f.result() for rank, f in asked.items() if f.done() and f.exception() is None
        }
        for rank, child in enumerate(self.children):
            path = self.facts[rank].log_path()
            if rank not in found and path and (text := stacks.by_signal(child.process.pid, path)):
                found[rank] = text
        return found

    def regroup(
        self, pending: Sequence[Pending], num_pieces: int, even: bool = True
    ) -> list[Pending]:
        """The pieces pass through this process anyway: cut again here, by a thread that waits for
        them.
        """
        return regroup_here(self, pending, num_pieces, even)

    def place(self, rank: int) -> str:
        """The child's process id."""
        return f"pid {self.children[rank].process.pid}"

    def shutdown(self) -> None:
        """Ask the children to end; one that does not leave by itself is killed."""
        for child in self.children:
            child.process.terminate()
        deadline = time.monotonic() + 5.0
        for child in self.children:
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


def regroup_here(
    transport: Transport, pending: Sequence[Pending], num_pieces: int, even: bool
) -> list[Pending]:
    """Pieces cut again in this process: now if they are there, otherwise by a thread that waits for
    them.
    """
    made = [
        Pending(rank, Future[Any](), Future[Any](), pending[0].role) for rank in range(num_pieces)
    ]

    def cut() -> None:
        try:
            headers = [_resolve(p.header) for p in pending]
            pieces = regroup_pieces(
                headers, [_resolve(p.payload) for p in pending], num_pieces, even
            )
        except Exception as error:  # noqa: BLE001 - it belongs to whoever reads these futures
            for piece in made:
                piece.header.set_exception(error)
                piece.payload.set_exception(error)
            return
        for piece, (payload, header) in zip(made, pieces, strict=True):
            piece.payload.set_result(payload)
            piece.header.set_result(header)

    waiting = [p.header for p in pending if isinstance(p.header, Future) and not p.header.done()]
    if waiting:
        threading.Thread(target=cut, name="regroup", daemon=True).start()
    else:
        cut()
    return made
