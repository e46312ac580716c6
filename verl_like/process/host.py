"""`WorkerHost` runs in a worker process: it has one instance per role, and runs their calls.

Each backend has a host in every process (a Ray actor, a child process, the caller's thread) and
sends `Call`s to it. The host gives every role its own random state and log file (`RoleState`), runs
one call at a time (except concurrent ones), passes batches as private copies (except to `readonly`
methods), and puts exceptions into headers.
"""

from __future__ import annotations

import asyncio
import copy
import faulthandler
import gc
import io
import os
import pickle
import random
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import CoroutineType
from typing import Any, TextIO

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from verl_like.batch.protocol import DataProto, Shard
from verl_like.batch.split import count_real_rows
from verl_like.calls.diagnose import SIGNAL, stacks_of_calls
from verl_like.calls.dispatch import ATTRIBUTE, Registration
from verl_like.calls.messages import Call, Header, RemoteError, UpstreamError, unpack
from verl_like.calls.result import split_result
from verl_like.errors import WorkerError
from verl_like.masking import add_secrets, mask_text
from verl_like.process.info import (
    ProcessInfo,
    environment,
    loopback_environment,
    torchrun_environment,
)
from verl_like.process.random_state import get_random_state, set_random_state
from verl_like.process.store import open_store
from verl_like.process.worker import Worker, construction, process_device
from verl_like.registry import module_of_file

LONE_SURROGATES = "backslashreplace"
"""The error handler for characters that no file can hold; samples may contain them."""


class RoleState:
    """One role of a process. Inside `with state:`, prints go to the role's log, too."""

    def __init__(self, role: str, process_info: ProcessInfo):
        """Seed the random state with (seed, role, rank), even if roles share the process."""
        self.worker: Any = None
        self.first_meshes: Any = None
        """The meshes that were registered when the roles of the process had been constructed."""
        self.log: RotatingLog | None = None
        self._teed: tuple[TextIO, TextIO] | None = None
        path = process_info.log_path(role)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.log = RotatingLog(path)
        seed = zlib.crc32(f"{process_info.seed}/{role}/{process_info.rank}".encode())
        saved = get_random_state()
        random.seed(seed)
        np.random.seed(seed)
        if torch.cuda.is_available():
            torch.manual_seed(seed)
        else:  # `torch.manual_seed` would keep a stack as text for every absent kind of device
            torch.default_generator.manual_seed(seed)
        self.random_state = get_random_state()
        set_random_state(saved)

    @property
    def meshes(self) -> Any:
        """The meshes that the worker has registered: the same dict until it registers another."""
        return getattr(self.worker, "_mesh_positions", None)

    def close(self) -> None:
        """Close the log; later output goes only to the process's own stream."""
        if self.log is not None:
            self.log.close()
            self.log = None

    def __enter__(self) -> None:
        """Send output to the role's log, too."""
        self._streams = sys.stdout, sys.stderr
        if self.log is not None:
            if self._teed != self._streams:
                self._teed = self._streams
                self._tees = _Tee(sys.stdout, self.log), _Tee(sys.stderr, self.log)
            sys.stdout, sys.stderr = self._tees

    def __exit__(self, *_: object) -> None:
        """Restore the streams."""
        sys.stdout, sys.stderr = self._streams


class RoleTurns:
    """Makes the log and the random state of a role those of the process during the role's call.

    In a process of their own they stay until another role's turn comes. In the caller's thread they
    end with the call, together with torchrun's environment variables.
    """

    def __init__(self, process_info: ProcessInfo, in_callers_thread: bool) -> None:
        self._in_callers_thread = in_callers_thread
        self._process_info = process_info
        self._current: RoleState | None = None
        self._variables = torchrun_environment(process_info, ("127.0.0.1", 0))

    def role_context(self, state: RoleState) -> AbstractContextManager[Any]:
        """Return the context of a call of this role."""
        if self._in_callers_thread:
            return self._borrow_process(state)
        if self._current is not state:
            if self._current is not None:
                self._current.random_state = get_random_state()
                self._current.__exit__()
            set_random_state(state.random_state)
            state.__enter__()
            self._current = state
        return nullcontext()

    def end(self) -> None:
        """End the turn of the last role, whose log will be closed."""
        if self._current is not None and not self._in_callers_thread:
            self._current.__exit__()
        self._current = None

    @contextmanager
    def _borrow_process(self, state: RoleState) -> Iterator[None]:
        if self._current is state:  # a call within a call
            yield
            return
        outer, caller = self._current, get_random_state()
        set_random_state(state.random_state)
        self._current = state
        variables = {**loopback_environment(self._process_info), **self._variables}
        try:
            with environment(variables), state:
                yield
        finally:
            state.random_state, self._current = get_random_state(), outer
            set_random_state(caller)


class RotatingLog(io.TextIOBase):
    """A log of limited size: when it is full, its content moves to a second file, `.1`.

    The file is emptied in place, because the process writes a crash into the same open file.
    """

    LIMIT = 16 * 2**20
    """Maximum size of each of the two files, in bytes."""

    def __init__(self, path: Path) -> None:
        """Append to the file."""
        self._path = path
        self._file = path.open("a", buffering=1, encoding="utf-8", errors=LONE_SURROGATES)
        self._num_bytes = path.stat().st_size

    def write(self, text: str) -> int:
        """Append the text; a full file is first copied to `.1` and emptied."""
        if self._num_bytes > self.LIMIT:
            self._file.flush()
            shutil.copyfile(self._path, self._path.with_name(self._path.name + ".1"))
            os.truncate(self._path, 0)
            self._num_bytes = 0
        self._num_bytes += len(text.encode(errors=LONE_SURROGATES))
        return self._file.write(text)

    def flush(self) -> None:
        """Write the buffered text to the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the log and its file."""
        super().close()
        self._file.close()


class _Tee(io.TextIOBase):
    """A stream that writes to the process's own stream and to the role's log, without secrets."""

    def __init__(self, *streams: TextIO | RotatingLog):
        self.streams = streams

    def write(self, text: str) -> int:
        masked = mask_text(text)
        for stream in self.streams:
            try:
                stream.write(masked)
            except UnicodeEncodeError as error:
                stream.write(masked.encode(error.encoding, LONE_SURROGATES).decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        for stream in self.streams:
            stream.flush()


RoleConstructors = dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
"""Role -> its class and constructor arguments."""
MethodResult = tuple[Any, dict[str, Any]]
"""The payload of a result, and the fields of its header that describe it."""
NOTHING: MethodResult = None, {}
START = "__init__"
"""The method name in the header of the roles' construction."""


def pack_constructors(constructors: RoleConstructors) -> bytes:
    """Pickle roles' classes and arguments for another process.

    A class that was loaded from a file's path is sent by value, because the other process has no
    module of that name.
    """
    modules = {module_of_file(cls) for cls, _, _ in constructors.values()}
    files = [module for module in modules if module is not None]
    for module in files:
        cloudpickle.register_pickle_by_value(module)
    try:
        packed: bytes = cloudpickle.dumps(constructors)
        return packed
    finally:
        for module in files:
            cloudpickle.unregister_pickle_by_value(module)


class WorkerHost:
    """The roles of one process.

    `start` constructs them, `call` runs a method, and `stacks`, which another thread calls, returns
    the stacks of the calls.
    """

    def __init__(
        self,
        roles: RoleConstructors | bytes,
        process_info: ProcessInfo,
        workers: dict[str, Worker] | None = None,
    ):
        """`roles` maps a role to its class and constructor arguments.

        Pickled roles are unpickled by `start`, whose header carries the error if that fails. If
        `workers` is set, calls run in the caller's own thread, and the instances go into it, by
        role.
        """
        self.process_info = replace(process_info, device_index=process_device(process_info).index)
        self._in_callers_thread = workers is not None
        self._turns = RoleTurns(self.process_info, self._in_callers_thread)
        self._coroutines = Coroutines()
        self._constructors = roles
        self._states: dict[str, RoleState] = {}
        self._workers: dict[str, Worker] = {} if workers is None else workers
        self._store: TCPStore | None = None
        self._master: tuple[str, int] | None = None
        self._pid = os.getpid()

    def open_store(self, address: str, port: int = 0) -> tuple[str, int]:
        """Bind the group's rendezvous store on this node, and keep it so that its port stays taken.

        If all processes are on one node, the store listens on the loopback interface.
        """
        if self.process_info.one_node:
            address = "127.0.0.1"
        try:
            self._store = open_store(address, port)
        except (OSError, RuntimeError, dist.DistError) as error:
            raise WorkerError(
                f"{self.process_info.name}: port {port} of {address} cannot be bound for the "
                f"group's rendezvous: {error}. If you set master_port, leave it out to use a free "
                "port."
            ) from error
        return address, self._store.port

    def start(self, master: tuple[str, int] | WorkerError | None) -> Header:
        """Construct every role, in order; the header carries the first error, if there is one."""
        return self._answer(START, self._begin, master)[1]

    def started(self) -> Header:
        """Return the header that `start` returned, so that another driver can read it."""
        return self._answer(START, lambda: NOTHING)[1]

    def construct_again(self) -> Header:
        """Free the old roles, then construct every role again with its initial random state.

        The process and its process group stay.
        """
        return self._answer(START, self._construct_again)[1]

    def located(self, place: Callable[[], Any]) -> tuple[Any, Header]:
        """Return the location of the process; the header carries an error of `place`."""
        return self._answer("location", lambda: (place(), {}))

    def call(self, call: Call, parts: Sequence[Any]) -> tuple[Any, Header]:
        """Run one method; return its payload, and a header with any error of the method.

        A concurrent call comes in its own thread. It leaves the process's random state and log as
        they are, because another role's call may be using them.
        """
        return self._answer(call.method, self._run, call, parts, role=call.role)

    def stacks(self) -> str:
        """Return the Python stacks of the threads that are in a call, newest frame last."""
        return stacks_of_calls(self._coroutines.loop, WorkerHost._answer.__code__)

    def close(self) -> None:
        """Close the log files and stop the event loop, in the caller's process."""
        for state in self._states.values():
            state.close()
        self._coroutines.close()

    def _begin(self, master: tuple[str, int] | WorkerError | None) -> MethodResult:
        if isinstance(master, WorkerError):
            raise master
        self._master = master
        if not self._in_callers_thread:
            self._set_up_process(master)
        return self._construct()

    def _construct_again(self) -> MethodResult:
        self._turns.end()
        for role, state in self._states.items():
            state.close()
            worker = self._workers.pop(role, None)
            if isinstance(worker, Worker):
                worker.close()
            del worker
        self._states.clear()

        gc.collect()  # workers and their engines refer to each other
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return self._construct()

    def _construct(self) -> MethodResult:
        # copies: a worker may write into its arguments, and they may be needed again
        roles = self._constructors
        constructors: RoleConstructors = (
            pickle.loads(roles) if isinstance(roles, bytes) else copy.deepcopy(roles)
        )
        for role, (cls, args, kwargs) in constructors.items():
            add_secrets([args, kwargs])
            self._states[role] = state = RoleState(role, self.process_info)
            process_info = replace(self.process_info, role=role, master=self._master)
            with construction(process_info, self._workers), self._turns.role_context(state):
                self._workers[role] = state.worker = cls(*args, **kwargs)
        for state in self._states.values():
            state.first_meshes = state.meshes
        return NOTHING

    def _set_up_process(self, master: tuple[str, int] | None) -> None:
        """Set torchrun's environment, and write stacks to the log on a signal and on a crash."""
        os.environ.update(torchrun_environment(self.process_info, master))
        os.environ.update(loopback_environment(self.process_info))
        path = self.process_info.log_path()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # open as long as the process lives
            self._crash_log = open(path, "a", encoding="utf-8")  # noqa: SIM115
            faulthandler.enable(self._crash_log)
            faulthandler.register(SIGNAL, self._crash_log)

    def _run(self, call: Call, parts: Sequence[Any]) -> MethodResult:
        """Fill in the arguments, run the method in its role's turn, and take the result apart."""
        state = self._states[call.role]
        method = getattr(state.worker, call.method)
        if call.concurrent:
            return self._coroutines.finish(method(*call.args, **call.kwargs)), {}
        mark: Registration | None = getattr(method, ATTRIBUTE, None)
        args, kwargs = list(call.args), call.kwargs
        shard: Shard | None = None  # of the first chunk, before the method changes it
        num_rows = 0
        if args or kwargs:
            readonly = mark is not None and mark.readonly
            args = [unpack(value, parts, readonly) for value in args]
            kwargs = {name: unpack(value, parts, readonly) for name, value in kwargs.items()}
            for value in (*args, *kwargs.values()):
                if shard is None and isinstance(value, DataProto) and value.shard is not None:
                    shard, num_rows = value.shard, len(value)
        with self._turns.role_context(state):
            result = self._coroutines.finish(method(*args, **kwargs))

        where = f"{call.role}.{call.method} on rank {self.process_info.rank}"
        fields: dict[str, Any] = {}
        if call.returns_batch:
            declared = "" if mark is None else mark.returns
            result, metrics, form = split_result(result, declared, where)
            fields = {"metrics": metrics, "returned": form}
        if fields.get("metrics") is None and not isinstance(result, DataProto):
            return result, fields

        fields["only_padding"] = shard is not None and shard.rows == 0
        if not isinstance(result, DataProto):
            return None, fields
        result = copy.copy(result)
        result.shard = shard
        fields["keys"] = *result.columns, *result.non_tensor_batch
        fields["rows"] = count_real_rows(result, num_rows, where)
        return result if call.sends_result else None, fields

    def _answer(
        self, method: str, work: Callable[..., MethodResult], *args: Any, role: str = ""
    ) -> tuple[Any, Header]:
        """Do the work and return its payload with a header, which carries its time or its error."""
        start, cpu = time.time(), time.process_time()
        (payload, fields), error = NOTHING, None
        try:
            payload, fields = work(*args)
        except UpstreamError as upstream:
            error = upstream.error
        except BaseException as failure:  # noqa: BLE001 - the process edge: every error travels
            is_main = threading.current_thread() is threading.main_thread()
            if self._in_callers_thread:
                ends_process = isinstance(failure, KeyboardInterrupt)
            else:
                ends_process = is_main and isinstance(failure, SystemExit)
            if ends_process:
                raise
            error = RemoteError.of(failure)

        # Drivers read the header of `start`, which has the meshes. They may leave a call's header
        # unread, so once a call has registered a mesh every later header carries the meshes.
        meshes, states = None, self._states
        if method == START or any(s.meshes is not s.first_meshes for s in states.values()):
            meshes = {role: state.meshes for role, state in states.items() if state.meshes}
        header = Header(
            role=role or self.process_info.name,
            method=method,
            rank=self.process_info.rank,
            pid=self._pid,
            start=start,
            end=time.time(),
            cpu_s=time.process_time() - cpu,
            error=error,
            mesh_layout=meshes,
            **fields,
        )
        return payload, header


class Coroutines:
    """The event loop of a process's coroutines, in its own thread; it starts when it is needed."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()  # two concurrent calls may need the loop at once

    def finish(self, value: Any) -> Any:
        """Return a plain value unchanged, or run a coroutine and return its result."""
        if not isinstance(value, CoroutineType):
            return value
        with self._starting:
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self.loop.run_forever, name="coroutines", daemon=True
                )
                self._thread.start()
        result, error = asyncio.run_coroutine_threadsafe(_caught(value), self.loop).result()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Stop the loop."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()
            self.loop = None


async def _caught(coroutine: CoroutineType[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Return the result of a coroutine, or its error: raising an exit would end the loop."""
    try:
        return await coroutine, None
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
        return None, error
