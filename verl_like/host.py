"""`WorkerHost`: what runs in a worker process. It holds one instance per role and runs one call at a time.

Each backend puts a host where its processes are (a Ray actor, a child process, the caller's thread) and carries `Call`s
to it. The host gives every role its own random state and log file, hands batches over as private copies, and turns
exceptions into headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import pickle
import random
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from verl_like.dispatch import ATTRIBUTE, Registration
from verl_like.errors import WorkerError
from verl_like.protocol import DataProto
from verl_like.random_state import get_random_state, set_random_state
from verl_like.split import drop_pad_rows, place_piece
from verl_like.transport import Call, Header, PieceSlot, RemoteError, Slot, WholeSlot
from verl_like.worker import ProcessFacts, Worker, current_facts

Recipes = dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class HostFacts:
    """What the driver decides about a process before it starts."""

    name: str
    rank: int
    world_size: int
    local_rank: int
    device_kind: str = "cpu"
    seed: int = 0
    log_dir: str | None = None
    rendezvous_s: float = 300.0
    one_node: bool = True


class _Upstream(Exception):
    """An argument could not be had because the call that makes it failed."""

    def __init__(self, error: RemoteError):
        self.error = error


class RoleState:
    """What belongs to one role of a process: its instance, its random state, its log file."""

    def __init__(self, role: str, facts: HostFacts):
        """The random state starts from (seed, role, rank): it does not depend on who shares the process."""
        self.worker: Any = None
        self.log: TextIO | None = None
        if facts.log_dir is not None:
            path = Path(facts.log_dir)
            path.mkdir(parents=True, exist_ok=True)
            self.log = open(path / f"{role}-{facts.rank}.log", "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        seed = zlib.crc32(f"{facts.seed}/{role}/{facts.rank}".encode())
        saved = get_random_state()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.random_state = get_random_state()
        set_random_state(saved)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """What is printed goes to the role's log too."""
        if self.log is None:
            yield
            return
        with (
            contextlib.redirect_stdout(_Tee(sys.stdout, self.log)),
            contextlib.redirect_stderr(_Tee(sys.stderr, self.log)),
        ):
            yield


class _Tee(io.TextIOBase):
    """Writes to the process's own stream and to the role's log."""

    def __init__(self, *streams: TextIO):
        self.streams = streams

    def write(self, text: str) -> int:
        for stream in self.streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self.streams:
            stream.flush()


class WorkerHost:
    """The roles of one process. `start` constructs them, `call` runs a method, `stacks` answers from another thread."""

    def __init__(self, roles: Recipes, facts: HostFacts, workers: dict[str, Worker] | None = None):
        """`roles` maps a role to its class and constructor arguments; `workers` is where the instances go, by role."""
        self.facts = facts
        self._in_callers_thread = workers is not None
        self._random_owner: RoleState | None = None
        self._recipes = roles
        self._states: dict[str, RoleState] = {}
        self._workers: dict[str, Worker] = {} if workers is None else workers
        self._store: TCPStore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reported_mesh: dict[str, dict[str, tuple[int, bool]]] = {}

    def open_store(self, address: str, port: int = 0) -> tuple[str, int]:
        """Bind the group's rendezvous store and keep it: the port cannot be taken between choice and use."""
        try:
            self._store = TCPStore(address, port, is_master=True, wait_for_workers=False)
        except (RuntimeError, dist.DistError) as error:
            raise WorkerError(
                f"{self.facts.name}: port {port} of {address} cannot be bound for the group's rendezvous: {error}. "
                "Leave the port out and a free one is chosen."
            ) from error
        return address, self._store.port

    def start(self, master: tuple[str, int] | None) -> Header:
        """Construct every role, in the order given; the header carries the first error, if any."""
        if self.facts.one_node and self.facts.world_size > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

        def construct() -> None:
            for role, (cls, args, kwargs) in self._recipes.items():
                self._states[role] = state = RoleState(role, self.facts)
                facts = ProcessFacts(
                    rank=self.facts.rank,
                    world_size=self.facts.world_size,
                    local_rank=self.facts.local_rank,
                    role=role,
                    master=master,
                    rendezvous_s=self.facts.rendezvous_s,
                    device_kind=self.facts.device_kind,
                    workers=self._workers,
                )
                token = current_facts.set(facts)
                try:
                    with self._active(state):
                        self._workers[role] = state.worker = cls(*args, **kwargs)
                finally:
                    current_facts.reset(token)

        return self._timed(Call(self.facts.name, "__init__"), construct)[1]

    def call(self, call: Call, parts: Sequence[Any]) -> tuple[Any, Header]:
        """Run one method. Never raises what the method raises: the header carries it."""
        return self._timed(call, lambda: self._run(call, parts))

    def close(self) -> None:
        """Close the log files: for a host that its process outlives."""
        for state in self._states.values():
            if state.log is not None:
                state.log.close()

    def stacks(self) -> str:
        """The Python stacks of this process's threads but the one that asks, newest frame last."""
        asking = threading.get_ident()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            text = "".join(traceback.format_stack(frame))
            if ident != asking and "verl_like/host.py" in text:
                parts.append(f"thread {names.get(ident, ident)}:\n{text}")
        return "\n".join(parts) or "idle: no call is running"

    def _run(self, call: Call, parts: Sequence[Any]) -> Any:
        state = self._states[call.role]
        method = getattr(state.worker, call.method)
        mark: Registration = getattr(method, ATTRIBUTE)
        args = [_fill(value, parts, mark.readonly) for value in call.args]
        kwargs = {name: _fill(value, parts, mark.readonly) for name, value in call.kwargs.items()}
        given = next((v for v in [*args, *kwargs.values()] if isinstance(v, DataProto) and v.shard is not None), None)
        shard, rows = (given.shard, len(given)) if given is not None else (None, 0)
        with self._active(state):
            result = method(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = self._await(result)
        result = drop_pad_rows(result, shard, rows, f"{call.role}.{call.method} on rank {self.facts.rank}")
        if isinstance(result, DataProto):
            result.shard = shard
        return result

    @contextlib.contextmanager
    def _active(self, state: RoleState) -> Iterator[None]:
        """The role's random state is the process's. It is swapped when another role's turn comes.

        In the caller's own thread the caller draws numbers too: there its state comes back after every call.
        """
        if self._random_owner is not state:
            caller = get_random_state()
            if self._random_owner is not None:
                self._random_owner.random_state = caller
            set_random_state(state.random_state)
            self._random_owner = state
        try:
            with state.logging():
                yield
        finally:
            if self._in_callers_thread:
                state.random_state, self._random_owner = get_random_state(), None
                set_random_state(caller)

    def _timed(self, call: Call, work: Callable[[], Any]) -> tuple[Any, Header]:
        header = Header(call.role, call.method, self.facts.rank, os.getpid(), time.time(), 0.0, time.process_time())
        result = None
        try:
            result = work()
        except _Upstream as upstream:
            header.error = upstream.error
        except Exception as error:  # noqa: BLE001 - the process edge: every error travels to the driver
            header.error = _as_remote(error)
        if isinstance(result, DataProto):
            header.rows = len(result)
            header.keys = (*(result.batch.keys() if result.batch is not None else ()), *result.non_tensor_batch)
        mesh = {
            role: dict(state.worker._mesh_facts)
            for role, state in self._states.items()
            if hasattr(state.worker, "_mesh_facts")
        }
        if mesh != self._reported_mesh:
            self._reported_mesh = header.mesh_facts = mesh
        header.end, header.cpu_s = time.time(), time.process_time() - header.cpu_s
        return result, header

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on this process's loop thread and wait: the process stays serial."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _fill(value: Any, parts: Sequence[Any], readonly: bool) -> Any:
    """An argument with its slots filled.

    A batch is a private, writable copy unless the method promised not to write.
    """
    if isinstance(value, Slot):
        value = parts[value.part]
    elif isinstance(value, PieceSlot):
        rows = _rows_of([parts[i] for i in value.headers])
        return place_piece(
            parts[value.payload] if readonly else parts[value.payload].writable_copy(), value.index, rows
        )
    elif isinstance(value, WholeSlot):
        _rows_of([parts[i] for i in value.headers])
        pieces = [parts[i] for i in value.payloads]
        return DataProto.concat(pieces) if isinstance(pieces[0], DataProto) else pieces
    return value.writable_copy() if isinstance(value, DataProto) and not readonly else value


def _rows_of(headers: Sequence[Header]) -> list[int]:
    for header in headers:
        if header.error is not None:
            raise _Upstream(header.error)
    return [header.rows or 0 for header in headers]


def _as_remote(error: Exception) -> RemoteError:
    text = "".join(traceback.format_exception(error))
    kept: BaseException | None = error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - user exceptions may refuse to be pickled in any way
        kept = None
    return RemoteError(kept, f"{type(error).__module__}.{type(error).__qualname__}", text)
