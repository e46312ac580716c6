"""`WorkerHost`: what runs in a worker process, one instance per role and one call at a time.

Each backend puts a host where its processes are (a Ray actor, a child process, the caller's thread)
and carries `Call`s to it. The host gives every role its own random state and log file, hands
batches over as private copies, and turns exceptions into headers.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from dataclasses import replace
from pathlib import Path
from types import CoroutineType
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from verl_like.batch.protocol import DataProto
from verl_like.batch.split import count_real_rows
from verl_like.batch.tensordict_rows import rows_of, value_of
from verl_like.calls.diagnose import SIGNAL, stacks_of_calls
from verl_like.calls.dispatch import ATTRIBUTE, Registration
from verl_like.calls.result import take_apart
from verl_like.calls.wire import Call, Header, RemoteError, UpstreamError, chunk_of, unpack
from verl_like.errors import WorkerError
from verl_like.masking import learn_secrets, mask_text
from verl_like.process.environment import (
    environment,
    loopback_environment,
    torchrun_environment,
)
from verl_like.process.facts import ProcessFacts
from verl_like.process.random_state import get_random_state, set_random_state
from verl_like.process.store import open_store
from verl_like.process.worker import Worker, construction, device_of

Recipes = dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]


Outcome = tuple[Any, dict[str, Any]]
"""The payload of a result, and what its header says of it."""
NOTHING: Outcome = None, {}
START = "__init__"
"""What headers call the construction of roles."""


class WorkerHost:
    """The roles of one process.

    `start` constructs them, `call` runs a method, `stacks` answers from another thread.
    """

    def __init__(
        self, roles: Recipes | bytes, facts: ProcessFacts, workers: dict[str, Worker] | None = None
    ):
        """`roles` maps a role to its class and constructor arguments.

        Pickled roles are unpickled by `start`, which can say what went wrong. The instances go into
        `workers`, by role; whoever gives this dict makes the calls in a thread of their own.
        """
        self.facts = replace(facts, device_index=device_of(facts).index)
        self._in_callers_thread = workers is not None
        self._turn: RoleState | None = None
        # nobody waits for it; `nullcontext` would be slower on every call
        self._one_call = threading.RLock()
        self._recipes = roles
        self._states: dict[str, RoleState] = {}
        self._known_meshes: dict[str, Any] | None = None
        """What a driver knows that the roles have registered; None if a call registered more."""
        self._workers: dict[str, Worker] = {} if workers is None else workers
        self._store: TCPStore | None = None
        self._master: tuple[str, int] | None = None
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._making_loop = threading.Lock()  # two calls past the queue may want it at once

    def open_store(self, address: str, port: int = 0) -> tuple[str, int]:
        """Bind the group's rendezvous store and keep it, so that nobody takes the port before.

        The address is this node's; ranks of one node meet on its loopback interface.
        """
        if self.facts.one_node:
            address = "127.0.0.1"
        try:
            self._store = open_store(address, port)
        except (OSError, RuntimeError, dist.DistError) as error:
            raise WorkerError(
                f"{self.facts.name}: port {port} of {address} cannot be bound for the group's "
                f"rendezvous: {error}. Leave master_port out and a free one is chosen."
            ) from error
        return address, self._store.port

    def start(self, master: tuple[str, int] | WorkerError | None) -> Header:
        """Construct every role, in the order given; the header carries the first error, if any."""
        return self._timed(lambda *_: self._begin(master), Call(self.facts.name, START), ())[1]

    def started(self) -> Header:
        """What `start` has said, for another driver."""
        return self._timed(lambda *_: NOTHING, Call(self.facts.name, START), ())[1]

    def construct_again(self) -> Header:
        """Construct every role anew, with the random state that it began with.

        The process stays, and so does its process group; what the roles held is freed before.
        """
        again = Call(self.facts.name, START)
        return self._timed(lambda *_: self._construct_again(), again, ())[1]

    def located(self, place: Callable[[], Any]) -> tuple[Any, Header]:
        """Where the process is, as the answer of a call: an error goes into its header."""
        return self._timed(lambda *_: (place(), {}), Call(self.facts.name, "location"), ())

    def call(self, call: Call, parts: Sequence[Any]) -> tuple[Any, Header]:
        """Run one method. Never raises what the method raises: the header carries it.

        One that goes past the queue has come in a thread of its own, and shares random state and
        log with the rest.
        """
        return self._timed(self._beside if call.past_queue else self._run, call, parts)

    def stacks(self) -> str:
        """The Python stacks of this process's threads but the one that asks, newest frame last."""
        return stacks_of_calls(self._loop, WorkerHost._timed.__code__)

    def close(self) -> None:
        """Give back what outlives a call: log files and the loop thread.

        A process of its own just ends.
        """
        for state in self._states.values():
            state.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join()
            self._loop.close()
            self._loop = None

    def _begin(self, master: tuple[str, int] | WorkerError | None) -> Outcome:
        if isinstance(master, WorkerError):
            raise master
        self._master = master
        if not self._in_callers_thread:
            self._own_the_process(master)
        return self._construct()

    def _construct_again(self) -> Outcome:
        if self._turn is not None and not self._in_callers_thread:
            self._turn.__exit__()
        self._turn = None
        for role, state in self._states.items():
            state.close()
            self._workers.pop(role, None)
        self._states.clear()

        gc.collect()  # workers and their engines refer to each other
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return self._construct()

    def _construct(self) -> Outcome:
        # a worker may write into its arguments, and they may be needed again
        given = self._recipes
        recipes = pickle.loads(given) if isinstance(given, bytes) else copy.deepcopy(given)
        for role, (cls, args, kwargs) in recipes.items():
            learn_secrets([args, kwargs])
            self._states[role] = state = RoleState(role, self.facts)
            facts = replace(self.facts, role=role, master=self._master)
            with construction(facts, self._workers), self._turn_of(state):
                self._workers[role] = state.worker = cls(*args, **kwargs)
        return NOTHING

    def _own_the_process(self, master: tuple[str, int] | None) -> None:
        """Set a process of our own up: torchrun's environment, stack dumps on signal and crash."""
        os.environ.update(torchrun_environment(self.facts, master))
        os.environ.update(loopback_environment(self.facts))
        path = self.facts.log_path()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # open as long as the process lives
            self._crash_log = open(path, "a", encoding="utf-8")  # noqa: SIM115
            faulthandler.enable(self._crash_log)
            faulthandler.register(SIGNAL, self._crash_log)

    def _run(self, call: Call, parts: Sequence[Any]) -> Outcome:
        """Fill the arguments, run the method in its role's turn, take the result apart."""
        state = self._states[call.role]
        method = getattr(state.worker, call.method)
        mark: Registration | None = getattr(method, ATTRIBUTE, None)
        args, kwargs, given = list(call.args), call.kwargs, None
        if args or kwargs:
            readonly = mark is not None and mark.readonly
            args = [unpack(value, parts, readonly) for value in args]
            kwargs = {name: unpack(value, parts, readonly) for name, value in kwargs.items()}
            given = chunk_of([*args, *kwargs.values()])
            args = [value_of(value) for value in args]
            kwargs = {name: value_of(value) for name, value in kwargs.items()}
        with self._turn_of(state):
            result = self._result(method(*args, **kwargs))

        about: dict[str, Any] = {}
        if call.returns_batch:
            declared = "" if mark is None else mark.returns
            result, metrics, form = take_apart(result, declared, self._where(call))
            about = {"metrics": metrics, "returned": form}
        elif given is not None:
            result = rows_of(result)
        if about.get("metrics") is None and not isinstance(result, DataProto):
            return result, about

        given = given or chunk_of([*args, *kwargs.values()])
        about["only_padding"] = given is not None and given.shard.rows == 0
        if not isinstance(result, DataProto):
            return None, about
        result = copy.copy(result)
        result.shard = given.shard if given else None
        about["keys"] = *result.columns, *result.non_tensor_batch
        about["rows"] = count_real_rows(result, given.num_rows if given else 0, self._where(call))
        return result if call.counts else None, about

    def _beside(self, call: Call, _: Sequence[Any]) -> Outcome:
        method = getattr(self._states[call.role].worker, call.method)
        return self._result(method(*call.args, **call.kwargs)), {}

    def _where(self, call: Call) -> str:
        return f"{call.role}.{call.method} on rank {self.facts.rank}"

    def _turn_of(self, state: RoleState) -> contextlib.AbstractContextManager[Any]:
        """The role's log is open and its random state is the process's.

        Both are swapped when another role's turn comes.
        """
        if self._in_callers_thread:
            return self._borrowing(state)
        if self._turn is not state:
            if self._turn is not None:
                self._turn.random_state = get_random_state()
                self._turn.__exit__()
            set_random_state(state.random_state)
            state.__enter__()
            self._turn = state
        return self._one_call

    @contextlib.contextmanager
    def _borrowing(self, state: RoleState) -> Iterator[None]:
        if self._turn is state:  # a call within a call
            yield
            return
        outer, caller = self._turn, get_random_state()
        set_random_state(state.random_state)
        self._turn = state
        try:
            here = torchrun_environment(self.facts, ("127.0.0.1", 0))
            with environment({**loopback_environment(self.facts), **here}), state:
                yield
        finally:
            state.random_state, self._turn = get_random_state(), outer
            set_random_state(caller)

    def _timed(
        self,
        work: Callable[[Call, Sequence[Any]], Outcome],
        call: Call,
        parts: Sequence[Any],
    ) -> tuple[Any, Header]:
        start, cpu = time.time(), time.process_time()
        (payload, about), error = NOTHING, None
        try:
            payload, about = work(call, parts)
        except UpstreamError as upstream:
            error = upstream.error
        except BaseException as failure:  # noqa: BLE001 - the process edge: every error travels
            if self._ends_the_process(failure):
                raise
            error = RemoteError.of(failure)

        mesh_facts = self._news_of_meshes(call)
        header = Header(
            role=call.role,
            method=call.method,
            rank=self.facts.rank,
            pid=self._pid,
            start=start,
            end=time.time(),
            cpu_s=time.process_time() - cpu,
            error=error,
            mesh_facts=mesh_facts,
            **about,
        )
        return payload, header

    def _news_of_meshes(self, call: Call) -> dict[str, Any] | None:
        """What the roles have registered of meshes, unless constructors did all of it.

        Drivers read the header of `start`; a call's they may leave unread, so all others tell then.
        """
        registered = {
            role: dict(facts)
            for role, state in self._states.items()
            if (facts := getattr(state.worker, "_mesh_facts", None))
        }
        if call.method == START:
            self._known_meshes = registered
        elif registered == self._known_meshes:
            return None
        else:
            self._known_meshes = None
        return registered

    def _ends_the_process(self, failure: BaseException) -> bool:
        """Whether an error is meant for the process: Ctrl-C in the driver's, an exit in our own."""
        if self._in_callers_thread:
            return isinstance(failure, KeyboardInterrupt)
        is_in_turn = threading.current_thread() is threading.main_thread()
        return is_in_turn and isinstance(failure, SystemExit)

    def _result(self, value: Any) -> Any:
        """The value itself; of a coroutine what it gives.

        It runs on a loop in a thread of its own, while this one waits.
        """
        if not isinstance(value, CoroutineType):
            return value
        with self._making_loop:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop_thread = threading.Thread(
                    target=self._loop.run_forever, name="coroutines", daemon=True
                )
                self._loop_thread.start()
        result, error = asyncio.run_coroutine_threadsafe(_caught(value), self._loop).result()
        if error is not None:
            raise error
        return result


async def _caught(coroutine: CoroutineType[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """What a coroutine gives, or its error: an exit would end the loop, and nobody would hear."""
    try:
        return await coroutine, None
    except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
        return None, error


# --------------------------------------------------------------------------- one role of a process

LONE_SURROGATES = "backslashreplace"
"""How a text is printed that has characters which no file can hold: a sample may."""


class RoleState:
    """One role of a process; inside `with state:` what is printed goes to the role's log too."""

    def __init__(self, role: str, facts: ProcessFacts):
        """The random state starts from (seed, role, rank), whoever shares the process."""
        self.worker: Any = None
        self.log: RotatingLog | None = None
        self._teed: tuple[TextIO, TextIO] | None = None
        path = facts.log_path(role)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.log = RotatingLog(path)
        seed = zlib.crc32(f"{facts.seed}/{role}/{facts.rank}".encode())
        saved = get_random_state()
        random.seed(seed)
        np.random.seed(seed)
        if torch.cuda.is_available():
            torch.manual_seed(seed)
        else:  # for each kind of device that is not there the above keeps the stack as text
            torch.default_generator.manual_seed(seed)
        self.random_state = get_random_state()
        set_random_state(saved)

    def close(self) -> None:
        """Close the log; what is printed later goes to the process's own stream only."""
        if self.log is not None:
            self.log.close()
            self.log = None

    def __enter__(self) -> None:
        """From now on what is printed goes to the role's log too."""
        self._streams = sys.stdout, sys.stderr
        if self.log is not None:
            if self._teed != self._streams:
                self._teed = self._streams
                self._tees = _Tee(sys.stdout, self.log), _Tee(sys.stderr, self.log)
            sys.stdout, sys.stderr = self._tees

    def __exit__(self, *_: object) -> None:
        """As it was before."""
        sys.stdout, sys.stderr = self._streams


class RotatingLog(io.TextIOBase):
    """A log that does not grow for ever: what is older than its newest megabytes goes to `.1`.

    The file keeps its place and whoever has it open: a crash is written into it, too.
    """

    LIMIT = 16 * 2**20
    """Bytes of each of the two."""

    def __init__(self, path: Path) -> None:
        """Go on at the file's end."""
        self._path = path
        self._file = path.open("a", buffering=1, encoding="utf-8", errors=LONE_SURROGATES)
        self._num_bytes = path.stat().st_size

    def write(self, text: str) -> int:
        """At the end of the file, which is emptied first where it is full."""
        if self._num_bytes > self.LIMIT:
            self._file.flush()
            shutil.copyfile(self._path, self._path.with_name(self._path.name + ".1"))
            os.truncate(self._path, 0)
            self._num_bytes = 0
        self._num_bytes += len(text.encode(errors=LONE_SURROGATES))
        return self._file.write(text)

    def flush(self) -> None:
        """Write what is buffered to the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the log and its file."""
        super().close()
        self._file.close()


class _Tee(io.TextIOBase):
    """Writes to the process's own stream and to the role's log, without secrets."""

    def __init__(self, *streams: TextIO | RotatingLog):
        self.streams = streams

    def write(self, text: str) -> int:
        shown = mask_text(text)
        for stream in self.streams:
            try:
                stream.write(shown)
            except UnicodeEncodeError as error:
                stream.write(shown.encode(error.encoding, LONE_SURROGATES).decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        for stream in self.streams:
            stream.flush()
