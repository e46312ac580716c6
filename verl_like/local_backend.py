"""The backend without a cluster: a pool of one process is the caller's own thread, a larger one is child processes of
this one.

`LocalWorkerGroup` takes what `RayWorkerGroup` takes and gives the same numbers, bit for bit. In the caller's thread
`breakpoint()` in a worker works; a call then runs when it is made, and a future keeps its result or its error.
"""

from __future__ import annotations

import copy
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from verl_like.child import receive, send
from verl_like.errors import WaitTimeoutError, WorkerDiedError, WorkerError
from verl_like.host import HostFacts, Recipes, WorkerHost
from verl_like.protocol import DataProto
from verl_like.resources import ResourcePool
from verl_like.split import regroup_pieces
from verl_like.transport import Call, Pending, Transport
from verl_like.watch import Deadlines, Patience, raise_start_errors
from verl_like.worker import Worker
from verl_like.worker_group import ClassWithInitArgs, WorkerGroup


@dataclass(frozen=True)
class _Done:
    """A reference to something that is there already."""

    value: Any

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class InlineTransport(Transport):
    """One process.

    The caller's, in the caller's thread. Values are copied on the way in and out, as between processes.
    """

    kind = "local"
    world_size = 1

    def __init__(self, recipes: Recipes, facts: HostFacts, deadlines: Deadlines, neighbours: dict[str, Worker]):
        """Constructs the roles at once.

        `neighbours` holds the roles of every inline pool, so that siblings find each other.
        """
        self.deadlines, self.finished, self.abandoned = deadlines, [], deque()
        self.process_key = id(neighbours)
        self.host = WorkerHost(copy.deepcopy(recipes), facts, neighbours)
        self.started = [self.host.start(None)]
        raise_start_errors(self, self.started)

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Runs the call now."""
        isolated = Call(call.role, call.method, *copy.deepcopy((call.args, call.kwargs)))
        payload, header = self.host.call(
            isolated, [self.fetch(p) if isinstance(p, (_Done, Future)) else p for p in parts]
        )
        payload = payload.writable_copy() if isinstance(payload, DataProto) else copy.deepcopy(payload)
        return Pending(rank, _Done(payload), _Done(header))

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Everything is there."""
        return list(references)

    def fetch(self, reference: Any) -> Any:
        """The value."""
        return reference.value if isinstance(reference, _Done) else reference.result()

    def stacks(self, seconds: float) -> dict[int, str]:
        """The caller's own stack is where it waits."""
        return {0: self.host.stacks()}

    def regroup(self, pending: Sequence[Pending], num_pieces: int) -> list[Pending]:
        """Cut again, here."""
        return _regroup_here(self, pending, num_pieces)

    def shutdown(self) -> None:
        """Nothing runs between calls; only the logs are open."""
        self.host.close()


class _Child:
    """One child process: a thread that sends (and waits for what a message refers to), a thread that receives."""

    def __init__(self, name: str):
        ours, theirs = Pipe()
        root = str(Path(__file__).resolve().parents[1])
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        command = [sys.executable, "-P", "-m", "verl_like.child", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        ours.send(sys.path)
        self.name, self.connection, self.lock = name, ours, threading.Lock()
        self.answers: dict[int, tuple[Future[Any], ...]] = {}
        self.outgoing: queue.Queue[tuple[int, str, tuple[Any, ...]]] = queue.Queue()
        self.dead: WorkerDiedError | None = None
        self.count = 0
        for target in (self._send, self._receive):
            threading.Thread(target=target, name=f"{name} pipe", daemon=True).start()

    def request(self, method: str, *args: Any, num_answers: int = 1) -> tuple[Future[Any], ...]:
        """Ask the host; one future for each value of the answer."""
        futures = tuple(Future[Any]() for _ in range(num_answers))
        with self.lock:
            self.count += 1
            number = self.count
            self.answers[number] = futures
        if self.dead is not None:
            self._fail_all()
        self.outgoing.put((number, method, args))
        return futures

    def _send(self) -> None:
        lock = threading.Lock()
        while True:
            number, method, args = self.outgoing.get()
            try:
                if method == "call":
                    call, parts = args
                    args = (
                        call,
                        [
                            p.result() if isinstance(p, Future) else p.value if isinstance(p, _Done) else p
                            for p in parts
                        ],
                    )
                send(self.connection, lock, (number, method, args))
            except OSError:
                return
            except Exception as error:  # noqa: BLE001 - a value that cannot be sent belongs to the future of its call
                self._answer(number, None, error)

    def _receive(self) -> None:
        try:
            while True:
                self._answer(*receive(self.connection))
        except (EOFError, OSError):
            code = self.process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
            self.dead = WorkerDiedError(f"the worker process (pid {self.process.pid}) {how}.")
            self._fail_all()

    def _answer(self, number: int, value: Any, error: BaseException | None) -> None:
        with self.lock:
            futures = self.answers.pop(number)
        for position, future in enumerate(futures):
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value[position] if len(futures) > 1 else value)

    def _fail_all(self) -> None:
        with self.lock:
            left, self.answers = list(self.answers.values()), {}
        for futures in left:
            for future in futures:
                future.set_exception(self.dead)


class ChildTransport(Transport):
    """One child process per rank of the pool."""

    kind = "local"

    def __init__(self, recipes: Recipes, facts: Sequence[HostFacts], deadlines: Deadlines):
        """Starts the processes, lets rank 0 bind the rendezvous, constructs the roles everywhere."""
        self.world_size, self.deadlines = len(facts), deadlines
        self.finished, self.abandoned = [], deque()
        self.process_key = id(self)
        self.facts = facts
        self.children = [_Child(f"{f.name} rank {f.rank}") for f in facts]
        try:
            for child, fact in zip(self.children, facts, strict=True):
                child.request("host", recipes, fact)
            master = self._await("rendezvous", self.children[0].request("open_store", "127.0.0.1", 0))[0]
            starting = [child.request("start", master)[0] for child in self.children]
            self.started = self._await("start", starting)
            raise_start_errors(self, self.started)
        except BaseException:
            self.shutdown()
            raise

    def _await(self, what: str, futures: Sequence[Future[Any]]) -> list[Any]:
        patience = Patience(f"{what} of {self.facts[0].name}", self.deadlines.start_s, self.deadlines.warn_s)
        while len(wait_futures(futures, patience.remaining()).done) < len(futures):
            late = [self.describe(rank) for rank, future in enumerate(futures) if not future.done()]
            if patience.over():
                raise WaitTimeoutError(
                    f"{patience.what} took longer than {patience.limit_s:.0f} s: no answer from {', '.join(late)}."
                )
            patience.warn_if_old(", ".join(late))
        return [future.result() for future in futures]

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue the call for the child's pipe."""
        payload, header = self.children[rank].request("call", call, list(parts), num_answers=2)
        return Pending(rank, payload, header)

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Those that are answered or failed."""
        return list(wait_futures(references, seconds, FIRST_COMPLETED).done)

    def fetch(self, reference: Any) -> Any:
        """The answer."""
        return reference.result()

    def stacks(self, seconds: float) -> dict[int, str]:
        """Asked of every child past its queue."""
        asked = {rank: child.request("stacks")[0] for rank, child in enumerate(self.children)}
        wait_futures(asked.values(), seconds)
        return {rank: f.result() for rank, f in asked.items() if f.done() and f.exception() is None}

    def regroup(self, pending: Sequence[Pending], num_pieces: int) -> list[Pending]:
        """The pieces pass through this process anyway: cut again, here."""
        return _regroup_here(self, pending, num_pieces)

    def describe(self, rank: int) -> str:
        """The role or roles, rank and process."""
        log = f", log {self.facts[rank].log_dir}" if self.facts[rank].log_dir else ""
        return f"{self.children[rank].name} of {self.world_size} (pid {self.children[rank].process.pid}{log})"

    def shutdown(self) -> None:
        """Close the pipes; a child that does not leave by itself is killed."""
        for child in self.children:
            child.process.terminate()
        deadline = time.monotonic() + 5.0
        for child in self.children:
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()


def _regroup_here(transport: Transport, pending: Sequence[Pending], num_pieces: int) -> list[Pending]:
    headers = [transport.fetch(p.header) for p in pending]
    pieces = regroup_pieces(headers, [transport.fetch(p.payload) for p in pending], num_pieces)
    return [Pending(rank, _Done(payload), _Done(header)) for rank, (payload, header) in enumerate(pieces)]


class LocalWorkerGroup(WorkerGroup):
    """A worker group of this process (a pool of one) or of child processes (a larger pool)."""

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        *,
        name_prefix: str = "worker",
        deadlines: Deadlines | None = None,
        seed: int = 0,
        log_dir: str | None = None,
        device_kind: str = "cpu",
        neighbours: dict[str, Worker] | None = None,
    ) -> None:
        """Arguments as for `RayWorkerGroup`.

        Groups given the same `neighbours` see each other as siblings when they run inline.
        """
        roles = ray_cls_with_init.roles(name_prefix)
        recipes: Recipes = {role: (made.cls, made.args, made.kwargs) for role, made in roles.items()}
        limits = deadlines or Deadlines()
        facts = [
            HostFacts(
                "+".join(roles), rank, resource_pool.world_size, local, device_kind, seed, log_dir, limits.rendezvous_s
            )
            for rank, local in enumerate(resource_pool.local_rank_list())
        ]
        transport: InlineTransport | ChildTransport
        if resource_pool.world_size == 1:
            transport = InlineTransport(recipes, facts[0], limits, {} if neighbours is None else neighbours)
        elif device_kind != "cpu":
            raise WorkerError("backend=local runs several processes on CPUs only; use backend=ray for several GPUs.")
        else:
            transport = ChildTransport(recipes, facts, limits)
        super().__init__(transport, {role: made.cls for role, made in roles.items()}, prefixed=ray_cls_with_init.fused)
