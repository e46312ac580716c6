"""Simulate the roles of a PPO run; see `simulated.py`."""

from __future__ import annotations

import pickle
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from simulated import Answer, Later, Meshes, Simulated, batch_answer, filled, packed_bytes

from verl_like import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.calls import result as form
from verl_like.calls.messages import Call, Pending
from verl_like.process.info import ProcessInfo
from workers.rollout.batches import REQUEST, batch_of, samples_of
from workers.rollout.sample import Sample
from workers.weights.sync import SyncReport
from workers.weights.transfer import PublishReport

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
    published: ClassVar[int] = 0
    """Newest version of the weights."""
    _counting: ClassVar[threading.Lock] = threading.Lock()
    _one_computes: ClassVar[threading.Lock] = threading.Lock()
    """Without it, these threads would compete with the driver's for the GIL; processes do not."""

    def __init__(self, facts: Sequence[ProcessInfo], meshes: Sequence[Meshes]) -> None:
        super().__init__(facts, meshes)
        self.version = 0
        """Version of the weights."""
        self._making: dict[int, list[tuple[float, DataProto]]] = defaultdict(list)
        """Rank -> its prompts, and when their samples are available."""
        self._take_s = 0.0

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
        if call.method == "submit":
            done_at = time.monotonic() + self._seconds(rank, GENERATE)
            self._making[rank].append((done_at, arguments[0]))
            return None, {}
        if call.method == "take":
            return self._taken(rank, arguments[1]), {}
        if call.method in METRICS:
            return None, {"metrics": METRICS[call.method], "returned": form.METRICS}
        if call.method == "update_weights":
            self.version = arguments[0]
            return SyncReport(num_bytes=SENT_BYTES), {}
        if call.method == "publish_weights":
            Workers.published = arguments[0]
            return PublishReport(SENT_BYTES), {}
        if call.method == "open_delivery":
            return (f"rank {rank}", Workers.published), {}
        if call.method in ("deliver_weights", "receive_weights"):
            self.version = Workers.published
            return SyncReport(num_bytes=SENT_BYTES), {}
        if call.method == "start_checkpoint":
            folder = Path(arguments[0])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{rank}.json").write_bytes(bytes(4096))
        if call.method == "export_model" and rank == 0:
            Path(arguments[0]).mkdir(parents=True)
        return (False if call.method == "start_checkpoint" else None), {}

    def _taken(self, rank: int, seconds: float) -> DataProto | None:
        """Return the samples that a generator's rank has finished after this time."""
        making, now = self._making[rank], time.monotonic()
        first = min(done_at for done_at, _ in making)
        self._take_s = min(max(0.0, first - now), seconds)
        finished = [data for done_at, data in making if done_at <= now + self._take_s]
        if not finished:
            return None
        self._making[rank] = [(at, data) for at, data in making if at > now + self._take_s]
        data = DataProto.concat(finished)
        payload, _ = sampled(data, self.version)
        return payload.union(DataProto.from_dict({REQUEST: data.padded(REQUEST)}))

    def seconds_of(self, rank: int, call: Call) -> float:
        if call.method == "take":
            return self._take_s
        return self._seconds(rank, call.method)

    def _seconds(self, rank: int, method: str) -> float:
        seconds = SECONDS.get(method, PASS_S if method in SCORED else 0.0)
        return seconds * (1 + SPREAD * rank / self.world_size)


def scored(data: DataProto, names: Sequence[str]) -> Answer:
    """Return a number for every response token."""
    mask = data.column("response_mask")
    assert isinstance(mask, RaggedTensor)
    numbers = torch.linspace(-1.0, -0.1, len(mask.values))
    payload = DataProto.from_dict({name: mask.with_values(numbers) for name in names})
    fields = {"metrics": {"perf/mfu/actor_infer": 0.4}} if len(names) > 1 else {}
    return batch_answer(payload, data, form.BOTH if fields else form.BATCH, **fields)


def sampled(data: DataProto, version: int) -> Answer:
    """Return responses of 64 to 512 tokens, which depend only on the sample's name."""

    def drawn(sample: Sample) -> Sample:
        length = 64 + sample.seed % (RESPONSE - 63)
        tokens = torch.full((length,), 5)
        versions = torch.full((length,), version, dtype=torch.int32)
        return sample.with_response(tokens, torch.full((length, 1), -0.5), versions, "stop")

    of_name = lambda uid, index: zlib.crc32(f"{uid}/{index}".encode())  # noqa: E731
    samples = [drawn(sample) for sample in samples_of(data, PROMPT, of_name)]
    pad = int(data.meta_info["pad_token_id"])
    samples += [Sample([pad], finish_reason="pad")] * (len(data) - len(samples))
    return batch_answer(batch_of(samples, (PROMPT, RESPONSE), pad, version), data, form.BATCH)
