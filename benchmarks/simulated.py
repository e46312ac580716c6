"""Simulate worker processes: a transport whose ranks answer in the driver's own process.

Real worker groups split, submit, wait and collect; `answer` returns what a rank would have
computed. A rank runs its calls one after the other and answers immediately, or after `seconds_of`
the call. Like a real rank, it also reports its stack over a connection.
"""

from __future__ import annotations

import multiprocessing
import pickle
import selectors
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from verl_like.backends.rpc import ProcessTransport, Requests, receive, send
from verl_like.batch.protocol import DataProto
from verl_like.calls.deadlines import Deadlines
from verl_like.calls.messages import Call, Header, Pending, unpack
from verl_like.process.info import ProcessInfo

Meshes = Mapping[str, Mapping[str, tuple[int, bool]]]
"""Role -> mesh -> (place of the rank, whether it returns results)."""
Answer = tuple[Any, dict[str, Any]]
"""The payload, and fields of the header."""


@dataclass(frozen=True, eq=False)
class Later:
    """A reference to a value that is available from a time on (`time.monotonic`)."""

    value: Any
    at: float = 0.0


class Simulated(ProcessTransport):
    """Ranks that answer a call with the result of `answer`."""

    kind = "simulated"

    def __init__(self, facts: Sequence[ProcessInfo], meshes: Sequence[Meshes]) -> None:
        """Take the facts about the processes, and the meshes of each rank."""
        super().__init__(facts, Deadlines())
        self.started = [
            _header(process.name, "__init__", process.rank, mesh_layout=places)
            for process, places in zip(facts, meshes, strict=True)
        ]
        self._free_at = [0.0] * len(facts)

    @abstractmethod
    def answer(self, rank: int, call: Call, parts: Sequence[Any]) -> Answer:
        """Return what a rank returns for a call."""

    def seconds_of(self, rank: int, call: Call) -> float:
        """Return how long a call takes on a rank."""
        return 0.0

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        payload, fields = self.answer(rank, call, parts)
        began = time.time()
        if seconds := self.seconds_of(rank, call):
            now = time.monotonic()
            at = self._free_at[rank] = max(now, self._free_at[rank]) + seconds
            began += at - seconds - now
        else:
            at = self._free_at[rank]
        packed = _header(call.role, call.method, rank, began, seconds, **fields).packed()
        return Pending(
            rank, Later(payload if call.sends_result else None, at), Later(packed, at), call.role
        )

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        now = time.monotonic()
        last = max((reference.at for reference in references), default=now)
        if last > now:
            time.sleep(min(last - now, seconds))
            now = time.monotonic()
        return [reference for reference in references if reference.at <= now]

    def fetch(self, reference: Any) -> Any:
        return reference.value

    def join(self, references: Sequence[Any]) -> Any:
        return Later([reference.value for reference in references])

    def pid_here(self, rank: int) -> int | None:
        return None

    def place(self, rank: int) -> str:
        return f"pid {1000 + rank} on node-{rank // 8}"

    def construct_again(self) -> None: ...

    def shutdown(self) -> None: ...


def filled(call: Call, parts: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call."""
    return [unpack(value, parts, readonly=True) for value in call.args]


def batch_answer(payload: DataProto, batch: DataProto, form: str, **fields: Any) -> Answer:
    """Return an answer with a batch that a rank computed from a chunk."""
    payload.shard = batch.shard
    keys = *payload.columns, *payload.non_tensor_batch
    is_padding = batch.shard is not None and batch.shard.rows == 0
    rows = batch.num_real_rows
    return payload, {
        "returned": form,
        "rows": rows,
        "keys": keys,
        "only_padding": is_padding,
    } | fields


def _header(
    role: str,
    method: str,
    rank: int,
    start: float | None = None,
    seconds: float = 0.0,
    **fields: Any,
) -> Header:
    start = time.time() if start is None else start
    return Header(role, method, rank, 1000 + rank, start, start + seconds, seconds, **fields)


class FarEnds:
    """The workers' ends of a driver's connections, all served by one thread."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        """CPU seconds of that thread; in a real run, the worker processes would use them."""
        self.num = 0
        self._selector = selectors.DefaultSelector()
        threading.Thread(target=self._serve, name="far ends", daemon=True).start()

    def connect(self, transport: ProcessTransport) -> None:
        """Open a connection to every rank."""
        requests = []
        for rank in range(transport.world_size):
            near, far = multiprocessing.Pipe()
            self._selector.register(far, selectors.EVENT_READ, rank)
            requests.append(Requests(near, lambda: "the process is gone"))
        transport.requests = requests
        self.num += len(requests)

    def _serve(self) -> None:
        lock = threading.Lock()
        while True:
            for key, _ in self._selector.select(timeout=0.5):
                connection = key.fileobj
                assert isinstance(connection, Connection)
                number, *_ = receive(connection)
                send(connection, lock, number, "answer", "idle: no call is running")
            self.cpu_s = time.thread_time()


def packed_bytes(value: Any) -> int:
    """Return the bytes that are sent, with out-of-band buffers."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return len(head) + sum(buffer.raw().nbytes for buffer in buffers)
