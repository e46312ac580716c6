"""The transport of Ray: calls are tasks of actors, each with the host of a worker process.

Payloads stay in the object store and go from worker to worker as references. Concurrent
calls, and requests for a worker's stacks, take a separate connection (`verl_like.backends.rpc`).

Calls and batches are pickled by `pickled` before Ray sees them, because Ray's own pickler takes
several times as long. Equal batches are put into the store once (`put_once`), because
several roles read the same columns in a step.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import xxhash
from ray import cloudpickle
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from verl_like.backends import rpc
from verl_like.backends.ray.cluster import RELEASE_S, ClusterProbe, within
from verl_like.backends.rpc import ProcessTransport, connect
from verl_like.batch.protocol import DataProto
from verl_like.calls.deadlines import Deadlines
from verl_like.calls.future import wait_for_start
from verl_like.calls.messages import (
    SHARED_BYTES,
    Answer,
    Call,
    Pending,
    answer_payload,
    combine_answer,
)
from verl_like.calls.transport import AnswerPart, resolve
from verl_like.errors import WorkerDiedError, WorkerError, pickling_message
from verl_like.process.child import ROOT
from verl_like.process.host import WorkerHost
from verl_like.process.info import ProcessInfo


@dataclass(frozen=True)
class Location:
    """The node of a worker process, and the address where it waits for its driver."""

    node: str
    endpoint: rpc.Endpoint


class RayHost:
    """The actor class.

    Calls run in turn, in the main thread: Ray's own threads would slow down every call.
    """

    def __init__(
        self, constructors: bytes, process_info: ProcessInfo, local_packages: list[str]
    ) -> None:
        """Set the import path before roles are unpickled, because that imports their modules."""
        prefer_local_packages(local_packages)
        import torch

        torch.set_num_threads(process_info.threads)
        self._host = WorkerHost(
            constructors, replace(process_info, device_index=_device_index(process_info))
        )

    def process_info(self) -> ProcessInfo:
        """Return the data that this process was started with."""
        return self._host.process_info

    def location(self) -> Answer:
        """Return the `Location` where a driver connects for concurrent calls."""
        return combine_answer(*self._host.located(self._wait_for_driver))

    def _wait_for_driver(self) -> Location:
        # if there is only one node, the driver is on it
        one_node = self._host.process_info.one_node
        address = "127.0.0.1" if one_node else ray.util.get_node_ip_address()
        node = ray.get_runtime_context().get_node_id()
        return Location(node, rpc.listen(address, self._host))

    def open_store(self, port: int) -> tuple[str, int] | WorkerError:
        """Bind the rendezvous store on this node, or return the error, which `start` reports."""
        try:
            return self._host.open_store(ray.util.get_node_ip_address(), port)
        except WorkerError as error:
            return error

    def start(self, master: tuple[str, int] | WorkerError) -> bytes:
        """Construct the roles."""
        return self._host.start(master).packed()

    def construct_again(self) -> bytes:
        """Construct the roles again."""
        return self._host.construct_again().packed()

    def start_header(self) -> bytes:
        """Return the header of `start`, from which another driver learns the meshes."""
        return self._host.started().packed()

    def call(self, packed: bytes | Call, *parts: Any) -> Answer | tuple[Any, bytes]:
        """Run one method, and return header and payload as one object, which is faster than two.

        If the payload may go to other workers, payload and header are two objects. The call is
        pickled unless only Ray can pickle it.
        """
        call: Call = pickle.loads(packed) if isinstance(packed, bytes) else packed
        payload, header = self._host.call(call, parts)
        if call.payload_is_apart:
            return payload, header.packed()
        return combine_answer(payload, header)


HostActor = ray.remote(RayHost)


def _device_index(process_info: ProcessInfo) -> int | None:
    """Return the index of the assigned GPU among those that this process sees; None if unknown.

    Ray shows a worker its own GPU only, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
    """
    assigned = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if process_info.device_kind != "cuda" or len(assigned) != 1:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        names = visible.split(",")
        return names.index(assigned[0]) if assigned[0] in names else None
    return int(assigned[0])


def local_packages() -> list[str]:
    """Return the imported packages that are in the folder of this project's packages."""
    packages = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and file and Path(file).parent == Path(ROOT, name):
            packages.append(name)
    return packages


def prefer_local_packages(names: Iterable[str]) -> None:
    """Move folders with packages of the same names behind our folder on the import path.

    Ray puts the driver's folder first.
    """
    files = {file for name in names for file in (name, f"{name}.py")}
    folders = [path for path in sys.path if path != ROOT and os.path.isdir(path)]
    namesakes = [path for path in folders if files & set(os.listdir(path))]
    if namesakes:
        rest = [path for path in sys.path if path not in namesakes and path != ROOT]
        sys.path[:] = [*rest, ROOT, *namesakes]


MAX_APART = 64
"""Maximum number of header references that a task gets as separate arguments."""
SUDDEN_END = (
    "it ended without an error message: it was killed by SIGKILL (by a user, by Ray's memory "
    "monitor, or by the kernel when memory ran out), or it crashed in native code. Look for a "
    "stack in its log."
)
ONLY_FOR_RAY = (b"__main__", b"\x03ray", b"ray.")
r"""Marks in a pickle that only Ray may unpickle.

Other processes cannot import `__main__`, and Ray has to count its own objects. (`\x03` is the
length of the name after it.)
"""


@ray.remote(num_cpus=0)
def _joined(*values: Any) -> list[Any]:
    return [*values]


class RayTransport(ProcessTransport):
    """Calls travel as actor tasks; a payload stays in the object store until it is fetched."""

    kind = "ray"
    has_store = True

    def __init__(
        self,
        actors: Sequence[Any],
        processes: Sequence[ProcessInfo],
        deadlines: Deadlines,
        names: Sequence[str],
        master_port: int | None = None,
    ):
        """Wait until every actor has its roles.

        With a `master_port` (0: rank 0 chooses one) the actors construct the roles now. Without
        one, another driver has constructed them.
        """
        super().__init__(processes, deadlines)
        self.actors, self.names = list(actors), list(names)
        self._tasks: dict[tuple[int, str, str, bool], Any] = {}
        self._here = ray.get_runtime_context().get_node_id()
        self._nodes: list[str] = []
        try:
            located = [actor.location.remote() for actor in self.actors]
            starting = self._start(master_port)
            self.started = wait_for_start(self, located)
            locations: list[Location] = [answer_payload(answer) for answer in ray.get(located)]
            self._cluster = ClusterProbe()
            self._nodes = [location.node for location in locations]
            self.requests = [
                connect(location.endpoint, partial(self._why_dead, rank))
                for rank, location in enumerate(locations)
            ]
            self.started = wait_for_start(self, starting)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, master_port: int | None) -> list[Any]:
        """Return references to the headers of the roles' construction."""
        if master_port is None:
            return [actor.start_header.remote() for actor in self.actors]
        master = self.actors[0].open_store.remote(master_port)
        return [actor.start.remote(master) for actor in self.actors]

    def construct_again(self) -> None:
        """Construct every actor's roles again."""
        answers = [actor.construct_again.remote() for actor in self.actors]
        self.started = wait_for_start(self, answers)

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Submit the call as a task of the rank's actor; a concurrent call uses the connection."""
        if call.concurrent:
            return self.call_concurrently(rank, call)
        # a worker cannot wait for an answer that comes over the driver's connection
        values = resolve(parts)
        key = rank, call.role, call.method, call.sends_result
        if key not in self._tasks:
            self._tasks[key] = self.actors[rank].call.options(
                name=f"{call.role}.{call.method}", num_returns=1 + call.payload_is_apart
            )
        task = self._tasks[key].remote(pickled(call) or call, *values)
        payload, header = task if call.payload_is_apart else (task, task)
        return Pending(rank, payload, header, call.role)

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Return the references that are in the store or have failed; none after Ray's shutdown."""
        if not ray.is_initialized():
            return []
        until = time.monotonic() + seconds
        coming = [reference for reference in references if isinstance(reference, AnswerPart)]
        ready = super().wait(coming, seconds) if coming else []
        tasks = [reference for reference in references if not isinstance(reference, AnswerPart)]
        if tasks:
            left_s = max(until - time.monotonic(), 0.0)
            ready += ray.wait(tasks, num_returns=len(tasks), timeout=left_s, fetch_local=False)[0]
        return ready

    def fetch(self, reference: Any) -> Any:
        """Return the value behind the reference, in this process."""
        if isinstance(reference, AnswerPart):
            return super().fetch(reference)
        try:
            return ray.get(reference)
        except (RayActorError, OutOfMemoryError) as error:
            raise WorkerDiedError(f"the worker process is gone: {_cause_of_death(error)}") from None
        except ObjectLostError as error:
            message = f"the result is lost, probably with its machine ({type(error).__name__})"
            raise WorkerDiedError(message) from None
        except RayTaskError as error:
            if isinstance(error.cause, WorkerError):
                raise error.cause from None
            raise WorkerError(pickling_message(error.cause)) from None
        except RaySystemError as error:
            reason = error.client_exc
            if isinstance(reason, Exception):  # raised by a class that could not be unpickled here
                text = pickling_message(f"{type(reason).__name__}: {reason}")
                raise WorkerError(text) from None
            raise WorkerError(f"Ray could not return the result: {error}") from None
        except RayError as error:
            raise WorkerError(f"Ray could not return the result: {error}") from None

    def fetch_together(self, references: Sequence[Any], seconds: float) -> list[Any] | None:
        """Fetch all values in one request; return None if one fails or is late."""
        if any(isinstance(reference, AnswerPart) for reference in references):
            return super().fetch_together(references, seconds)
        try:
            return list(ray.get(list(references), timeout=seconds))
        except RayError:
            return None

    def place(self, rank: int) -> str:
        """Return the process and its node, or the actor's name before it has started."""
        if not self._nodes:
            return f"actor {self.names[rank]}"
        return f"pid {self.started[rank].pid} on {self._cluster.address(self._nodes[rank])}"

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the ranks whose process, node or cluster head is gone or stopped, and why."""
        if not self._nodes:
            return {}
        ranks, head = list(ranks), self._cluster.head_failure()
        lost = super().lost(ranks)
        for rank in ranks:
            why = head or self._cluster.node_failure(self._nodes[rank])
            if why:
                lost[rank] = why
        return lost

    def _why_dead(self, rank: int) -> str:
        return f"the worker process (pid {self.started[rank].pid}) is gone: {SUDDEN_END}"

    def pid_here(self, rank: int) -> int | None:
        """Return the actor's process id if it is on this node."""
        is_here = self._nodes and self._nodes[rank] == self._here
        return self.started[rank].pid if is_here else None

    def shutdown(self) -> None:
        """Kill the actors, in bounded time if the cluster does not answer."""
        if ray.is_initialized():
            within(RELEASE_S, self._kill, f"ending the workers of {self.processes[0].name}")

    def _kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def join(self, references: Sequence[Any]) -> Any | None:
        """Join many references in a task, because each argument of a call takes time."""
        return _joined.remote(*references) if len(references) > MAX_APART else None

    @staticmethod
    def share(value: Any) -> tuple[Any, Any]:
        """Return a value as a part of calls, and the object that keeps it in the store.

        A batch that is small without its padding travels with the call: to put it and to pass a
        reference would take the driver several times as long.
        """
        packed = pickled_batch(value)
        if packed is None:
            reference = ray.put(value)
            return reference, reference
        if packed.num_bytes < SHARED_BYTES:
            return packed, None
        stored = put_once(packed)
        return stored.reference, stored


def _cause_of_death(error: Exception) -> str:
    """Return why a process ended, as far as Ray knows."""
    text = " ".join(str(error).split())
    if "low on memory" in text:
        return (
            "Ray killed it because its node ran low on memory. Give the role fewer rows at a time, "
            "put fewer processes on the node, or set a higher RAY_memory_usage_threshold where "
            f"the node's Ray is started. Ray's report: {text}"
        )
    if "connection error code" in text:
        return SUDDEN_END
    return text.split("The actor died", 1)[-1].strip(" .:") if "The actor died" in text else text


# ------------------------------------------------------------------------------- values on the way


@dataclass
class PickledBatch:
    """A pickle with separate buffers, which unpickles to the value itself."""

    head: bytes
    buffers: Sequence[pickle.PickleBuffer]

    @property
    def num_bytes(self) -> int:
        """Bytes of the pickle and its buffers together."""
        return len(self.head) + sum(buffer.raw().nbytes for buffer in self.buffers)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Keep the buffers out of band when pickled again, so they are not copied."""
        return _value_of, (self.head, self.buffers)


def _value_of(head: bytes, buffers: Sequence[Any]) -> Any:
    return pickle.loads(head, buffers=buffers)


def pickled(value: Any, buffers: list[pickle.PickleBuffer] | None = None) -> bytes | None:
    """Return a value's pickle and append its data to `buffers`; None if only Ray can pickle it."""
    if cloudpickle.list_registry_pickle_by_value():
        return None
    try:
        head = pickle.dumps(value, 5, buffer_callback=None if buffers is None else buffers.append)
    except Exception:  # noqa: BLE001 - users' objects may raise anything
        return None
    return None if any(word in head for word in ONLY_FOR_RAY) else head


def pickled_batch(value: Any) -> PickledBatch | None:
    """Pickle a batch with its buffers; None if it is not a batch, or only Ray can pickle it."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickled(value, buffers) if type(value) is DataProto else None
    return None if head is None else PickledBatch(head, buffers)


@dataclass(eq=False)
class StoredBatch:
    """A batch in the store, which stays there as long as this object exists."""

    reference: Any
    """A Ray `ObjectRef`."""


_held: weakref.WeakValueDictionary[tuple[str, bytes], StoredBatch] = weakref.WeakValueDictionary()
"""The batches in the store, by connection to a cluster and digest of the content."""
_putting = threading.Lock()


def put_once(packed: PickledBatch) -> StoredBatch:
    """Put a batch into the store, unless an equal batch is already there."""
    digest = xxhash.xxh3_128(packed.head)
    for buffer in packed.buffers:
        digest.update(buffer.raw())
    key = ray.get_runtime_context().get_worker_id(), digest.digest()
    with _putting:
        stored = _held.get(key) or StoredBatch(ray.put(packed))
        _held[key] = stored
        return stored
