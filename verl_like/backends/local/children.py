"""Calls to child processes of this one, over a pipe each.

The other end of the pipe is `verl_like.backends.local.child`. A message may refer to the result
of another child: the thread that writes into a child's pipe waits for it first, so no worker ever
waits inside a call for its arguments.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from multiprocessing.connection import Connection
from typing import Any, Protocol

import cloudpickle

from verl_like.backends.local.child import receive, send
from verl_like.backends.local.references import Done, regroup_here, resolve
from verl_like.calls import stacks
from verl_like.calls.answers import wait_for_start
from verl_like.calls.messages import Call, Pending
from verl_like.calls.progress import Progress
from verl_like.calls.transport import Transport
from verl_like.calls.waiting import Deadlines
from verl_like.errors import WorkerDiedError, WorkerError
from verl_like.process.child import start_child
from verl_like.process.environment import ONE_THREAD
from verl_like.process.facts import ProcessFacts
from verl_like.process.host import Recipes


class ChildProcess(Protocol):
    """What is used of a `subprocess.Popen`."""

    pid: int

    def kill(self) -> None:
        """End it."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit status once it has ended; None where another process waits for it."""


StartRank = Callable[[ProcessFacts, Mapping[str, str]], tuple[ChildProcess, Connection]]
"""(facts of a rank, variables of its environment) -> its process, which runs `child.main`, and the
pipe to it.
"""


def start_child_rank(
    facts: ProcessFacts, env: Mapping[str, str]
) -> tuple[ChildProcess, Connection]:
    """A new process."""
    return start_child("verl_like.backends.local.child", env={**ONE_THREAD, **env})


class _Child:
    """The process of one rank, with a thread that sends to it and one that receives from it.

    The sending thread waits for what a message refers to.
    """

    def __init__(self, name: str, process: ChildProcess, connection: Connection):
        self.name = name
        self.process, self.connection = process, connection
        self.lock, self.sending = threading.Lock(), threading.Lock()
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
        if method in ("stacks", "progress", "past_queue"):
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
            send(self.connection, self.sending, number, method, resolve(args))
        except OSError:
            return  # `_receive` finds out why
        except WorkerError as error:
            self._answer(number, error)
        except Exception as error:  # noqa: BLE001 - it belongs to the future of its call
            what = f"the arguments cannot be sent to the worker process: {type(error).__name__}"
            self._answer(number, WorkerError(f"{what}: {error}"))

    def _receive(self) -> None:
        try:
            while True:
                number, method, load = receive(self.connection)
                self._answer(number, _answer_of(method, load))
        except (EOFError, OSError):
            how = _how_it_ended(self.process.wait())
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


def _how_it_ended(code: int | None) -> str:
    """A process's exit code in words."""
    if code is None:
        return "has ended; torchrun, which started it, says how"
    if code >= 0:
        return f"exited with status {code}"
    how = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        how += " (by hand, or by the kernel when memory ran out)"
    return how


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
        facts: Sequence[ProcessFacts],
        deadlines: Deadlines,
        env: Mapping[str, str],
        master_port: int,
        start_rank: StartRank = start_child_rank,
    ):
        """Starts the processes, lets rank 0 bind the rendezvous, constructs the roles."""
        super().__init__(facts, deadlines)
        pickled = cloudpickle.dumps(recipes)
        self.children = [_Child(f"{f.name} rank {f.rank}", *start_rank(f, env)) for f in facts]
        try:
            for child, fact in zip(self.children, facts, strict=True):
                child.request("host", pickled, fact)
            master = self.children[0].request("open_store", "127.0.0.1", master_port)[0]
            starting = [child.request("start", master)[0] for child in self.children]
            self.started = wait_for_start(self, starting)
        except BaseException:
            self.shutdown()
            raise

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue the call for the child's pipe."""
        method = "past_queue" if call.past_queue else "call"
        payload, header = self.children[rank].request(method, call, list(parts), num_answers=2)
        return Pending(rank, payload, header, call.role)

    def construct_again(self) -> None:
        """Asked of every child in its turn."""
        asked = [child.request("construct_again")[0] for child in self.children]
        self.started = wait_for_start(self, asked)

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Those that are answered or failed."""
        here = [r for r in references if isinstance(r, Done)]
        left = [r for r in references if not isinstance(r, Done)]
        return here + list(wait_futures(left, 0.0 if here else seconds, FIRST_COMPLETED).done)

    def fetch(self, reference: Any) -> Any:
        """The answer."""
        return resolve(reference)

    def stacks(self, seconds: float) -> dict[int, str]:
        """Asked of every child past its queue; of one that cannot answer, by signal."""
        found: dict[int, str] = self._answered("stacks", seconds)
        for rank, child in enumerate(self.children):
            path = self.facts[rank].log_path()
            if rank in found or path is None:
                continue
            text = stacks.stack_by_signal(child.process.pid, path)
            if text:
                found[rank] = text
        return found

    def progress(self, seconds: float) -> dict[int, Progress]:
        """Asked of every child past its queue."""
        return self._answered("progress", seconds)

    def _answered(self, method: str, seconds: float) -> dict[int, Any]:
        """What the children answer in that time, by rank, of those that do."""
        asked = {rank: child.request(method)[0] for rank, child in enumerate(self.children)}
        wait_futures(asked.values(), seconds)
        found = {}
        for rank, answer in asked.items():
            if answer.done() and answer.exception() is None:
                found[rank] = answer.result()
        return found

    def regroup(
        self, pending: Sequence[Pending], num_pieces: int, even: bool = True
    ) -> list[Pending]:
        """The pieces pass through this process anyway: cut again here, once they have come."""
        return regroup_here(pending, num_pieces, even)

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those whose process has ended."""
        return {rank: str(dead) for rank in ranks if (dead := self.children[rank].dead)}

    def pid_here(self, rank: int) -> int:
        """The child's."""
        return self.children[rank].process.pid

    def can_kill(self, rank: int) -> bool:
        """Every rank's."""
        return True

    def kill(self, rank: int) -> None:
        """Kill the child."""
        self.children[rank].process.kill()

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
