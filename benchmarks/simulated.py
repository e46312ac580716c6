"""Simulate the roles of a PPO run: a transport whose ranks answer in the driver's own process.

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
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch

from verl_like import DataProto
from verl_like.backends.rpc import ProcessTransport, Requests, receive, send
from verl_like.batch.ragged import RaggedTensor
from verl_like.calls import result as form
from verl_like.calls.deadlines import Deadlines
from verl_like.calls.messages import Call, Header, Pending, unpack
from verl_like.process.info import ProcessInfo
from workers.rollout.sample import Sample, read_samples, to_batch
from workers.weights.sync import SyncReport

PROMPT, RESPONSE = 512, 512
SENT_BYTES = 2**20
"""Bytes of weights in the driver's metrics; workers send weights to workers, not to the driver."""
GENERATE = "generate_sequences"
SECONDS = {GENERATE: 4.0, "update_actor": 2.5, "update_critic": 2.0}
"""Seconds of calls that compute; long enough for the driver to start monitoring the ranks."""
PASS_S = 1.5
SPREAD = 0.25
"""Delay of a call's last rank relative to the first, as a fraction of these seconds."""
SCORED = {
    "compute_log_prob": ("old_log_probs", "entropys"),
    "compute_ref_log_prob": ("ref_log_prob",),
    "compute_values": ("values",),
    "compute_rm_score": ("rm_scores",),
}
METRICS = {
    "update_actor": {
        **dict.fromkeys(("actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl"), 0.1),
        **dict.fromkeys(("actor/entropy", "actor/grad_norm", "actor/lr"), 0.1),
        "perf/mfu/actor": 0.4,
    },
    "update_critic": dict.fromkeys(("critic/vf_loss", "critic/grad_norm", "critic/lr"), 0.1),
}
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


def batch_answer(payload: DataProto, batch: DataProto, returned: str, **fields: Any) -> Answer:
    """Return an answer with a batch that a rank computed from a chunk."""
    payload.shard = batch.shard
    keys = *payload.columns, *payload.non_tensor_batch
    is_padding = batch.shard is not None and batch.shard.rows == 0
    rows = batch.num_real_rows
    return payload, {
        "returned": returned,
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


@dataclass(frozen=True, eq=False)
class Shared:
    """A value in a shared store."""

    value: Any


class Workers(Simulated):
    """Ranks of all roles of a PPO run."""

    has_store = True
    cpu_s: ClassVar[float] = 0.0
    """CPU seconds of all ranks, which are not the driver's work."""
    bytes_out: ClassVar[int] = 0
    bytes_in: ClassVar[int] = 0
    _counting: ClassVar[threading.Lock] = threading.Lock()
    _one_computes: ClassVar[threading.Lock] = threading.Lock()
    """Without it, these threads would compete with the driver's for the GIL; processes do not."""

    def __init__(self, facts: Sequence[ProcessInfo], meshes: Sequence[Meshes]) -> None:
        super().__init__(facts, meshes)
        self.version = 0
        """Version of the weights."""

    def share(self, value: Any) -> tuple[Any, Any]:
        """Pickle once what several ranks get."""
        self._send(value)
        return Shared(value), None

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Pickle what the driver sends."""
        self._send((call.args, call.kwargs))
        values = [part.value if isinstance(part, Shared) else part for part in parts]
        return super().submit(rank, call, values)

    def _send(self, value: Any) -> None:
        num_bytes = packed_bytes(value)
        with self._counting:
            Workers.bytes_out += num_bytes

    def fetch(self, reference: Later) -> Any:
        """Pickle what a worker returns, and unpickle it in the driver; headers are small."""
        if reference.value is None or isinstance(reference.value, bytes):
            return reference.value
        with self._computing():
            buffers: list[pickle.PickleBuffer] = []
            head = pickle.dumps(reference.value, 5, buffer_callback=buffers.append)
            num_bytes = len(head) + sum(buffer.raw().nbytes for buffer in buffers)
        with self._counting:
            Workers.bytes_in += num_bytes
        return pickle.loads(head, buffers=buffers)

    def answer(self, rank: int, call: Call, parts: Sequence[Any]) -> Answer:
        with self._computing():
            return self._answer(rank, call, filled(call, parts))

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with self._one_computes:
            began = time.thread_time()
            yield
            Workers.cpu_s += time.thread_time() - began

    def _answer(self, rank: int, call: Call, arguments: Sequence[Any]) -> Answer:
        if call.method in SCORED:
            return scored(arguments[0], SCORED[call.method])
        if call.method == GENERATE:
            return sampled(arguments[0], self.version)
        if call.method in METRICS:
            return None, {"metrics": METRICS[call.method], "returned": form.ONLY_METRICS}
        if call.method == "update_weights":
            self.version = arguments[0]
            return SyncReport(num_bytes=SENT_BYTES), {}
        if call.method == "start_checkpoint":
            folder = Path(arguments[0])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{rank}.json").write_bytes(bytes(4096))
        if call.method == "export_model" and rank == 0:
            Path(arguments[0]).mkdir(parents=True)
        return (False if call.method == "start_checkpoint" else None), {}

    def seconds_of(self, rank: int, call: Call) -> float:
        seconds = SECONDS.get(call.method, PASS_S if call.method in SCORED else 0.0)
        return seconds * (1 + SPREAD * rank / self.world_size)


def scored(data: DataProto, names: Sequence[str]) -> Answer:
    """Return a number for every response token."""
    mask = data.column("response_mask")
    assert isinstance(mask, RaggedTensor)
    numbers = torch.linspace(-1.0, -0.1, len(mask.values))
    payload = DataProto.from_dict({name: mask.with_values(numbers) for name in names})
    fields = {"metrics": {"perf/mfu/actor_infer": 0.4}} if len(names) > 1 else {}
    return batch_answer(payload, data, form.WITH_METRICS if fields else form.ONLY_BATCH, **fields)


def sampled(data: DataProto, version: int) -> Answer:
    """Return responses of 64 to 512 tokens, which depend only on the sample's name."""

    def drawn(sample: Sample) -> Sample:
        length = 64 + sample.seed % (RESPONSE - 63)
        tokens = torch.full((length,), 5)
        versions = torch.full((length,), version, dtype=torch.int32)
        return sample.with_response(tokens, torch.full((length, 1), -0.5), versions, "stop")

    of_name = lambda uid, index: zlib.crc32(f"{uid}/{index}".encode())  # noqa: E731
    samples = [drawn(sample) for sample in read_samples(data, PROMPT, of_name)]
    pad = int(data.meta_info["pad_token_id"])
    samples += [Sample([pad], finish_reason="pad")] * (len(data) - len(samples))
    return batch_answer(to_batch(samples, (PROMPT, RESPONSE), pad, version), data, form.ONLY_BATCH)
