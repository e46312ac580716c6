"""The local backend: worker groups without Ray. Its results equal those of Ray bit for bit.

A pool of one process runs in the caller's own thread (`InlineTransport`), so `breakpoint()` works
in a worker. Larger pools, and pools with `own_processes`, are child processes (`ChildTransport`).
"""

from __future__ import annotations

import contextlib
import copy
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from verl_like.backends.rpc import ProcessTransport, Requests
from verl_like.batch.protocol import DataProto
from verl_like.calls.deadlines import Deadlines, in_daemon
from verl_like.calls.future import wait_for_start
from verl_like.calls.group import ClassWithInitArgs, WorkerGroup, check_group_arguments
from verl_like.calls.messages import Call, Header, Pending
from verl_like.calls.transport import AnswerPart, Transport, resolve
from verl_like.errors import ConfigError, PlacementError, WorkerError
from verl_like.placement.pools import ResourcePool
from verl_like.process.child import start_child
from verl_like.process.host import RoleConstructors, WorkerHost, pack_constructors
from verl_like.process.info import ONE_THREAD, ProcessInfo, checked_worker_env
from verl_like.process.threads import computing_with
from verl_like.process.worker import Worker


class LocalWorkerGroup(WorkerGroup):
    """A worker group without Ray: in this process, or in child processes.

    Example:

        pool = ResourcePool([2])                            # two processes on this machine
        group = LocalWorkerGroup(pool, ClassWithInitArgs(Adder, 1))
        group.add(data)                                     # a method with `@register`

    Args:
        resource_pool: a pool of one process runs in this process.
        ray_cls_with_init: the worker's class, or the result of `create_colocated_worker_cls`.
        name_prefix: the role's name, in messages and logs.
        worker_env: environment variables of child processes.
        deadlines: limits of the waits, in seconds; None takes the defaults.
        seed: seed of the workers' random numbers.
        threads: number of threads with which torch computes in each process on a CPU.
        log_dir: folder for a log per role and rank; None writes none.
        master_port: port of the first rank's store; 0 chooses a free one.
        device_name: "cpu", or in this process also "cuda".
        neighbors: role -> worker in this process; groups that share the dict are siblings.
        own_processes: start a child process for a pool of one process as well.
        detached: must be False.

    Raises:
        PlacementError: `detached` is set, or roles clash.
        ConfigError: a variable of `worker_env` is reserved, or the worker has no own process.
        WorkerError: a process does not start in time, or dies.
        Exception: whatever a constructor raises.
    """

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        *,
        name_prefix: str = "worker",
        worker_env: Mapping[str, str] | None = None,
        deadlines: Deadlines | None = None,
        seed: int = 0,
        threads: int = 1,
        log_dir: str | None = None,
        master_port: int = 0,
        device_name: str = "cpu",
        neighbors: dict[str, Worker] | None = None,
        own_processes: bool = False,
        detached: bool = False,
    ) -> None:
        """Start the processes and construct the roles."""
        if detached:
            raise PlacementError(
                "detached=True: processes of the local backend end with their driver. Use "
                "RayWorkerGroup."
            )
        check_group_arguments(self, ResourcePool, resource_pool, ray_cls_with_init)
        constructors = ray_cls_with_init.constructors(name_prefix)
        limits, env = deadlines or Deadlines(), checked_worker_env(worker_env)
        processes = resource_pool.process_infos(
            "+".join(constructors),
            limits,
            device_kind=device_name,
            seed=seed,
            threads=threads,
            log_dir=log_dir,
        )
        transport: Transport
        if resource_pool.world_size == 1 and not own_processes:
            if env:
                raise ConfigError(
                    "worker_env: a local pool of one process runs in the driver's process. Set "
                    "os.environ instead."
                )
            siblings = {} if neighbors is None else neighbors
            transport = InlineTransport(constructors, processes[0], limits, siblings)
        else:
            if device_name != "cpu":
                raise WorkerError(
                    "trainer.backend=local starts child processes only on CPUs, but "
                    f"{processes[0].name} needs {len(processes)} of them on GPUs. Set "
                    "trainer.backend=ray, or trainer.device=cpu."
                )
            transport = ChildTransport(constructors, processes, limits, env, master_port)
        classes = {
            r: role_class.cls for r, role_class in ray_cls_with_init.roles(name_prefix).items()
        }
        super().__init__(transport, classes, prefixed=ray_cls_with_init.prefixed)


# -------------------------------------------------------------------------- in the caller's thread

_one_call = threading.RLock()
"""Lets one thread at a time run a call: inline groups share the random state and environment.

It is reentrant, because a call may make another call.
"""


class InlineTransport(Transport):
    """A transport that runs calls in the caller's own process and thread.

    `submit` runs the call, and the future has the result or the error. Arguments and results are
    copied, except large batches for `readonly` methods. Calls from several threads take turns, also
    on different inline groups. A concurrent call runs in its own thread.
    """

    kind = "local"

    def __init__(
        self,
        constructors: RoleConstructors,
        process_info: ProcessInfo,
        deadlines: Deadlines,
        neighbors: dict[str, Worker],
    ):
        """Construct the roles immediately. `neighbors` has the roles of all inline pools."""
        super().__init__([process_info], deadlines)
        self.process_key = id(neighbors)
        self.host = WorkerHost(constructors, process_info, neighbors)
        self._construct(lambda: self.host.start(None))

    def _construct(self, work: Callable[[], Header]) -> None:
        answer = Future[Header]()
        with _one_call, computing_with(self.processes[0].threads):
            answer.set_result(work())
        self.started = wait_for_start(self, [answer])

    def construct_again(self) -> None:
        """Construct the roles again in the caller's thread."""
        self._construct(self.host.construct_again)

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Run the call now; a concurrent call, which may take long, runs in its own thread."""
        isolated = copy.deepcopy(call)
        if call.concurrent:
            answer = in_daemon(call.method, self._run, isolated, ())
        else:
            answer = Future()
            # the host copies batches
            values = [v if isinstance(v, DataProto) else copy.deepcopy(v) for v in resolve(parts)]
            with _one_call, computing_with(self.processes[0].threads):
                answer.set_result(self._run(isolated, values))
        return Pending(rank, AnswerPart(answer, 0), AnswerPart(answer, 1), call.role)

    def _run(self, call: Call, parts: Sequence[Any]) -> tuple[Any, Header]:
        value, header = self.host.call(call, parts)
        is_batch = isinstance(value, DataProto)
        return value.writable_copy() if is_batch else copy.deepcopy(value), header

    def stacks(self, seconds: float) -> dict[int, str]:
        """Return the stacks of the calls that are running in this process."""
        return {0: self.host.stacks()}

    def place(self, rank: int) -> str:
        """Return "in the caller's thread", for messages."""
        return "in the caller's thread"

    def shutdown(self) -> None:
        """Close the roles' logs and stop their event loop; there is no process to end."""
        self.host.close()


# --------------------------------------------------------------------------------- child processes


class _Child(Requests):
    """The process of one rank, with a thread that sends its calls one after another.

    A call may refer to the result of another child. The thread waits for that result, so that no
    worker ever waits for its arguments inside a call.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], connection: Connection):
        self.process = process
        self._outgoing: queue.Queue[tuple[int, str, tuple[Any, ...]] | None] = queue.Queue()
        super().__init__(connection, self._why_dead)
        threading.Thread(target=self._send_in_turn, name=f"{name} pipe", daemon=True).start()

    def ask_in_turn(self, method: str, *args: Any) -> Future[Any]:
        """Send a request to the host after all earlier requests."""
        number, answer = self.expect()
        self._outgoing.put((number, method, args))
        return answer

    def _send_in_turn(self) -> None:
        while (message := self._outgoing.get()) is not None:
            number, method, args = message
            try:
                self.send(number, method, resolve(args))
            except WorkerError as error:  # from a call that this one refers to
                self.set_answer(number, error)

    def _why_dead(self) -> str:
        code = self.process.wait()
        self._outgoing.put(None)
        ending = f"exited with status {code}"
        if code < 0:
            ending = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            ending += " (by a user, or by the kernel when memory ran out)"
        return f"the worker process (pid {self.process.pid}) {ending}."


class ChildTransport(ProcessTransport):
    """One child process per rank of the pool, with a pipe to each."""

    kind = "local"

    def __init__(
        self,
        constructors: RoleConstructors,
        processes: Sequence[ProcessInfo],
        deadlines: Deadlines,
        env: Mapping[str, str],
        master_port: int,
    ):
        """Start the processes, bind the rendezvous on rank 0, and construct the roles."""
        super().__init__(processes, deadlines)
        pickled, variables = pack_constructors(constructors), {**ONE_THREAD, **env}
        self.requests = self.children = [
            _Child(f"{p.name} rank {p.rank}", *start_child("verl_like.backends.rpc", env=variables))
            for p in processes
        ]
        try:
            for child, process_info in zip(self.children, processes, strict=True):
                child.ask_in_turn("host", pickled, process_info)
            master = self.children[0].ask_in_turn("open_store", "127.0.0.1", master_port)
            starting = [child.ask_in_turn("start", master) for child in self.children]
            self.started = wait_for_start(self, starting)
        except BaseException:
            self.shutdown()
            raise

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue the call for the child's pipe, or send it at once if it is concurrent."""
        if call.concurrent:
            return self.call_concurrently(rank, call)
        answer = self.children[rank].ask_in_turn("call", call, list(parts))
        return Pending(rank, AnswerPart(answer, 0), AnswerPart(answer, 1), call.role)

    def construct_again(self) -> None:
        """Construct every rank's roles again, after the calls that are queued."""
        answers = [child.ask_in_turn("construct_again") for child in self.children]
        self.started = wait_for_start(self, answers)

    def pid_here(self, rank: int) -> int:
        """The process id of the rank's child."""
        return self.children[rank].process.pid

    def place(self, rank: int) -> str:
        """The child's process id."""
        return f"pid {self.children[rank].process.pid}"

    def shutdown(self) -> None:
        """Kill the children: they have nothing to finish, and a stopped process cannot answer."""
        for child in self.children:
            child.process.kill()
        deadline = time.monotonic() + 5.0
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the process hangs in the kernel
                child.process.wait(max(0.1, deadline - time.monotonic()))
