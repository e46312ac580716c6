"""The local backend: worker groups without a cluster, with the numbers of Ray bit for bit.

A pool of one process is the caller's own thread (`InlineTransport`), so `breakpoint()` in a worker
works. Larger pools, and those that are to run beside the driver, are child processes
(`ChildTransport`).
"""

from __future__ import annotations

import contextlib
import copy
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from verl_like.backends.rpc import Part, ProcessTransport, Requests
from verl_like.batch.protocol import DataProto
from verl_like.calls.diagnose import Deadlines
from verl_like.calls.future import wait_for_start
from verl_like.calls.group import ClassWithInitArgs, WorkerGroup, method_table
from verl_like.calls.transport import Transport
from verl_like.calls.wire import Call, Pending
from verl_like.errors import ConfigError, PlacementError, WorkerError
from verl_like.placement.pools import ResourcePool
from verl_like.process.child import start_child
from verl_like.process.environment import ONE_THREAD, checked_worker_env
from verl_like.process.facts import ProcessFacts
from verl_like.process.host import Recipes, WorkerHost
from verl_like.process.store import new_secret
from verl_like.process.worker import Worker


class LocalWorkerGroup(WorkerGroup):
    """A worker group of this process, or of child processes."""

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        *,
        name_prefix: str = "worker",
        worker_env: Mapping[str, str] | None = None,
        deadlines: Deadlines | None = None,
        seed: int = 0,
        log_dir: str | None = None,
        master_port: int = 0,
        device_name: str = "cpu",
        neighbours: dict[str, Worker] | None = None,
        own_processes: bool = False,
        detached: bool = False,
    ) -> None:
        """Arguments as for `RayWorkerGroup`.

        With `own_processes` a pool of one is a child process, too. Groups that are given the same
        `neighbours` are siblings when they run inline.
        """
        if detached:
            raise PlacementError(
                "detached=True: processes of the local backend end with their driver; take "
                "RayWorkerGroup."
            )
        roles = ray_cls_with_init.roles(name_prefix)
        classes = {role: made.cls for role, made in roles.items()}
        method_table(classes, ray_cls_with_init.prefixed)
        recipes: Recipes = {
            role: (made.cls, made.args, made.kwargs) for role, made in roles.items()
        }

        limits, env = deadlines or Deadlines(), checked_worker_env(worker_env)
        facts = resource_pool.facts(
            "+".join(roles),
            device_kind=device_name,
            seed=seed,
            log_dir=log_dir,
            rendezvous_s=limits.rendezvous_s,
            call_s=limits.call_s,
            collective_s=limits.collective_s,
            secret=new_secret(),
        )
        transport: Transport
        if resource_pool.world_size == 1 and not own_processes:
            if env:
                raise ConfigError(
                    "worker_env: a local pool of one process is this very process; set os.environ "
                    "instead."
                )
            siblings = {} if neighbours is None else neighbours
            transport = InlineTransport(recipes, facts[0], limits, siblings)
        else:
            if device_name != "cpu":
                raise WorkerError(
                    f"backend=local has child processes on CPUs only, and {facts[0].name} would be "
                    f"{len(facts)} of them on GPUs. Use backend=ray, or trainer.device=cpu."
                )
            transport = ChildTransport(recipes, facts, limits, env, master_port)
        super().__init__(transport, classes, prefixed=ray_cls_with_init.prefixed)


# --------------------------------------------------------------------------------------- references


@dataclass(frozen=True, eq=False)
class Done:
    """A reference to something that is there already."""

    value: Any


def _resolve(value: Any) -> Any:
    """References anywhere in a message's lists and tuples, as values; waits for them."""
    if isinstance(value, Part):
        return value.value()
    if isinstance(value, Future):
        return value.result()
    if isinstance(value, Done):
        return value.value
    if type(value) in (list, tuple):
        return type(value)(map(_resolve, value))
    return value


class _LocalTransport(Transport):
    """References of the local backend: to values that are there, and to answers to come."""

    kind = "local"

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """The references that are answered or have failed: at least one, unless time runs out."""
        here = [one for one in references if isinstance(one, Done)]
        coming = [one for one in references if not isinstance(one, Done)]
        futures = {one.answer if isinstance(one, Part) else one for one in coming}
        done = wait_futures(futures, 0.0 if here else seconds, FIRST_COMPLETED).done
        return here + [one for one in coming if getattr(one, "answer", one) in done]

    def fetch(self, reference: Any) -> Any:
        """The value behind the reference."""
        return _resolve(reference)


# -------------------------------------------------------------------------- in the caller's thread

_one_call = threading.RLock()
"""Held by the thread whose call runs: inline groups share the process's random state and
environment. A call within a call is in the same thread."""


class InlineTransport(_LocalTransport):
    """One process: the caller's, in the caller's thread.

    A call runs when it is made; its future keeps the result or the error. Values are copied on the
    way in and out. Calls of several threads run in turn, whichever inline group they are for. A
    call past the queue runs in a thread of its own, beside the others.
    """

    def __init__(
        self,
        recipes: Recipes,
        facts: ProcessFacts,
        deadlines: Deadlines,
        neighbours: dict[str, Worker],
    ):
        """Construct the roles at once. `neighbours` holds the roles of every inline pool."""
        super().__init__([facts], deadlines)
        self.process_key = id(neighbours)
        self.host = WorkerHost(recipes, facts, neighbours)
        with _one_call:
            header = self.host.start(None)
        self.started = wait_for_start(self, [Done(header)])

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Run the call now; one past the queue may last, as a checkpoint's writing does."""
        isolated = copy.deepcopy(call)
        if call.past_queue:
            answer = Future[Any]()
            work = isolated, answer
            threading.Thread(target=self._call_beside, args=work, daemon=True).start()
            return Pending(rank, Part(answer, 0), Part(answer, 1), call.role)
        with _one_call:
            value, header = self.host.call(isolated, [_resolve(part) for part in parts])
        return Pending(rank, Done(_private(value)), Done(header), call.role)

    def _call_beside(self, call: Call, answer: Future[Any]) -> None:
        try:
            value, header = self.host.call(call, ())
        except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
            answer.set_exception(error)
        else:
            answer.set_result((_private(value), header))

    def construct_again(self) -> None:
        """Construct the roles again in the caller's thread."""
        with _one_call:
            header = self.host.construct_again()
        self.started = wait_for_start(self, [Done(header)])

    def stacks(self, seconds: float) -> dict[int, str]:
        """The caller's own stack is where it waits."""
        return {0: self.host.stacks()}

    def place(self, rank: int) -> str:
        """The caller's thread, in words."""
        return "in the caller's thread"

    def shutdown(self) -> None:
        """Close the roles' logs and stop their event loop; there is no process to end."""
        self.host.close()


def _private(value: Any) -> Any:
    """A copy for the caller."""
    return value.writable_copy() if isinstance(value, DataProto) else copy.deepcopy(value)


# --------------------------------------------------------------------------------- child processes


class _Child(Requests):
    """The process of one rank, with a thread that sends its calls in turn.

    A call may refer to the result of another child. That thread waits for it, so no worker ever
    waits inside a call for its arguments.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], connection: Connection):
        self.process = process
        self._outgoing: queue.Queue[tuple[int, str, tuple[Any, ...]] | None] = queue.Queue()
        super().__init__(connection, self._why_dead)
        threading.Thread(target=self._send_in_turn, name=f"{name} pipe", daemon=True).start()

    def ask_in_turn(self, method: str, *args: Any) -> Future[Any]:
        """Ask the host, after what it was asked before."""
        number, answer = self.expect()
        self._outgoing.put((number, method, args))
        return answer

    def _send_in_turn(self) -> None:
        while (message := self._outgoing.get()) is not None:
            number, method, args = message
            try:
                self.send(number, method, _resolve(args))
            except WorkerError as error:  # of a call that this one refers to
                self.settle(number, error)

    def _why_dead(self) -> str:
        code = self.process.wait()
        self._outgoing.put(None)
        how = f"exited with status {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (by hand, or by the kernel when memory ran out)"
        return f"the worker process (pid {self.process.pid}) {how}."


class ChildTransport(_LocalTransport, ProcessTransport):
    """One child process per rank of the pool, with a pipe to each."""

    def __init__(
        self,
        recipes: Recipes,
        facts: Sequence[ProcessFacts],
        deadlines: Deadlines,
        env: Mapping[str, str],
        master_port: int,
    ):
        """Start the processes, let rank 0 bind the rendezvous, construct the roles."""
        super().__init__(facts, deadlines)
        pickled, variables = cloudpickle.dumps(recipes), {**ONE_THREAD, **env}
        self.requests = self.children = [
            _Child(f"{f.name} rank {f.rank}", *start_child("verl_like.backends.rpc", env=variables))
            for f in facts
        ]
        try:
            for child, fact in zip(self.children, facts, strict=True):
                child.ask_in_turn("host", pickled, fact)
            master = self.children[0].ask_in_turn("open_store", "127.0.0.1", master_port)
            starting = [child.ask_in_turn("start", master) for child in self.children]
            self.started = wait_for_start(self, starting)
        except BaseException:
            self.shutdown()
            raise

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue the call for the child's pipe; one past the queue is sent at once."""
        if call.past_queue:
            return self.call_past_queue(rank, call)
        answer = self.children[rank].ask_in_turn("call", call, list(parts))
        return Pending(rank, Part(answer, 0), Part(answer, 1), call.role)

    def construct_again(self) -> None:
        """Asked of every child in its turn."""
        asked = [child.ask_in_turn("construct_again") for child in self.children]
        self.started = wait_for_start(self, asked)

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
