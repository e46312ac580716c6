"""One side of `bench_scale.py`: PPO steps over simulated ranks.

python scale_side.py RANKS TP STEPS FOLDER PROFILE      # prints JSON
"""

from __future__ import annotations

import cProfile
import io
import json
import os
import pickle
import pstats
import resource
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from bench_detection import make_judge
from simulated import Answer, FarEnds, Simulated, batch_answer, filled, packed_bytes

from trainer import load_config
from trainer.groups import worker_groups
from trainer.groups.worker_groups import WorkerGroups
from trainer.launch import show_plan
from trainer.ppo.step import PPOTrainer
from trainer.run_folder.folder import FolderLock, note_start, open_run_folder
from verl_like import DataProto, WorkerGroup
from verl_like.batch.ragged import Ragged
from verl_like.calls import result as form
from verl_like.calls.messages import Call, Pending
from verl_like.calls.worker_classes import ClassWithInitArgs, create_colocated_worker_cls
from verl_like.placement.plan import PoolPlan
from verl_like.placement.pools import Node, ResourcePool
from workers.roles.rollout import oldest_versions
from workers.rollout.batches import sample_columns, samples_of
from workers.rollout.draws import draw_hashes
from workers.rollout.sample import Sample
from workers.weights.channel import SyncReport

ON_NODE = 8
SAMPLES_A_RANK, SAMPLES_A_PROMPT = 4, 4
PROMPT, RESPONSE = 512, 512
SECONDS = {"generate_sequences": 4.0, "update_actor": 2.5, "update_critic": 2.0}
"""Of calls that compute: longer than what is read at once, so that the driver watches over them."""
PASS_S = 1.5
SPREAD = 0.25
"""Of these seconds: by so much a call's last rank is later than its first."""
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


class Workers(Simulated):
    """Ranks of all roles of a PPO run."""

    cpu_s: ClassVar[float] = 0.0
    """Of all of them: no work of the driver's."""
    bytes_out: ClassVar[int] = 0
    bytes_in: ClassVar[int] = 0
    version = 0
    """Of the weights."""

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """The driver pickles what it sends."""
        Workers.bytes_out += sum(map(packed_bytes, ((call.args, call.kwargs), *parts)))
        return super().submit(rank, call, parts)

    def fetch_payload(self, pending: Pending) -> Any:
        """A worker pickles what it gives, and the driver reads it."""
        if pending.payload.value is None:
            return None
        began = time.thread_time()
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(pending.payload.value, 5, buffer_callback=buffers.append)
        Workers.bytes_in += len(head) + sum(buffer.raw().nbytes for buffer in buffers)
        Workers.cpu_s += time.thread_time() - began
        return pickle.loads(head, buffers=buffers)

    def answer(self, rank: int, call: Call, parts: Sequence[Any]) -> Answer:
        began = time.thread_time()
        try:
            return self._answer(rank, call, filled(call, parts))
        finally:
            Workers.cpu_s += time.thread_time() - began

    def _answer(self, rank: int, call: Call, arguments: Sequence[Any]) -> Answer:
        if call.method in SCORED:
            return scored(arguments[0], SCORED[call.method])
        if call.method == "generate_sequences":
            return sampled(arguments[0], self.version)
        if call.method in METRICS:
            return None, {"metrics": METRICS[call.method], "returned": form.METRICS}
        if call.method == "update_weights":
            self.version = arguments[0]
            return SyncReport(num_bytes=2**20), {}
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
    """A number for every token of the responses."""
    mask = data.column("response_mask")
    assert isinstance(mask, Ragged)
    numbers = torch.linspace(-1.0, -0.1, len(mask.values))
    payload = DataProto.from_dict({name: mask.with_values(numbers) for name in names})
    about = {"metrics": {"perf/mfu/actor_infer": 0.4}} if len(names) > 1 else {}
    return batch_answer(payload, data, form.BOTH if about else form.BATCH, **about)


def sampled(data: DataProto, version: int) -> Answer:
    """Responses of 64 to 512 tokens, by what the sample is called."""

    def drawn(sample: Sample) -> Sample:
        length = 64 + sample.key % (RESPONSE - 63)
        tokens = torch.full((length,), 5)
        versions = torch.full((length,), version, dtype=torch.int32)
        return sample.with_response(tokens, torch.full((length, 1), -0.5), versions, "stop")

    of_name = lambda uid, index: zlib.crc32(f"{uid}/{index}".encode())  # noqa: E731
    samples = [drawn(sample) for sample in samples_of(data, PROMPT, of_name)]
    pad = int(data.meta_info["pad_token_id"])
    columns = {
        **sample_columns(data, samples, RESPONSE, pad),
        "policy_version": oldest_versions(samples, len(data), version),
        "draw_hash": draw_hashes(samples, len(data)),
    }
    reasons = ["stop"] * len(samples) + ["pad"] * (len(data) - len(samples))
    made = DataProto.from_dict(columns, {"finish_reason": reasons})
    return batch_answer(made, data, form.BATCH)


class SimulatedPools(worker_groups.PoolStarter):
    """Starts pools of `Workers`, with a connection to each rank."""

    tp: ClassVar[int] = 1
    far_ends: ClassVar[FarEnds]

    def start(self, plan: PoolPlan, classes: Mapping[str, type]) -> WorkerGroup:
        made = {role: ClassWithInitArgs(cls, self.config) for role, cls in classes.items()}
        recipe = create_colocated_worker_cls(made)
        facts = ResourcePool(plan.process_on_nodes).facts("+".join(classes))
        places = [(rank // self.tp, rank % self.tp == 0) for rank in range(len(facts))]
        meshes = [
            {role: {"train": place, "rollout": place} for role in classes} for place in places
        ]
        workers = Workers(facts, meshes)
        self.far_ends.connect(workers)
        return WorkerGroup(workers, dict(classes), prefixed=recipe.prefixed)


class Gauge:
    """A callback: what the driver spent in every step, and the most that it had open."""

    def __init__(self, far_ends: FarEnds) -> None:
        self.steps: list[dict[str, float]] = []
        self._far_ends, self._ended = far_ends, threading.Event()
        self._most = {"files": 0, "threads": 0}
        self._before = self._now()
        threading.Thread(target=self._look, name="gauge", daemon=True).start()

    def _now(self) -> dict[str, float]:
        own = time.process_time() - Workers.cpu_s - self._far_ends.cpu_s
        return {"driver s": own, "MB out": Workers.bytes_out / 1e6, "MB in": Workers.bytes_in / 1e6}

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            open_now = {
                "files": len(os.listdir("/proc/self/fd")) - self._far_ends.num,
                "threads": threading.active_count() - 2,
            }
            self._most = {name: max(most, open_now[name]) for name, most in self._most.items()}

    def on_step_begin(self, trainer: Any) -> None:
        """The step's counters begin."""
        self._before = self._now()

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """The step's numbers are there."""
        now = self._now()
        self.steps.append({name: now[name] - before for name, before in self._before.items()})

    def end(self) -> dict[str, float]:
        """The median step, without the first."""
        self._ended.set()
        rows = self.steps[1:]
        return {name: statistics.median(row[name] for row in rows) for name in rows[0]} | self._most


class Measured(PPOTrainer):
    """Notes the driver's CPU seconds of stages."""

    gauge: ClassVar[Gauge]
    cpu_of: ClassVar[dict[str, list[float]]] = {}

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        before = self.gauge._now()["driver s"]
        with super().clock(stage):
            yield
        own = self.gauge._now()["driver s"] - before
        self.cpu_of.setdefault(stage, []).append(own)


def make_inputs(folder: Path, num_prompts: int) -> Path:
    """A tiny model, whose tokens are characters, and prompts of 100 to 500 of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from trainer.cli import make_tiny

    tiny = make_tiny.make(folder / "tiny")
    sizes = json.loads((tiny / "model/config.json").read_text())
    sizes["max_position_embeddings"] = PROMPT + RESPONSE
    (tiny / "model/config.json").write_text(json.dumps(sizes))
    make_judge(tiny)
    rows = make_tiny.make_rows(num_prompts, "train")
    for number, row in enumerate(rows):
        row["prompt"][0]["content"] += " a" * (50 + number * 37 % 190)
    pq.write_table(pa.Table.from_pylist(rows), tiny / "train.parquet")
    return tiny


def settings(folder: Path, tiny: Path, num_ranks: int, steps: int) -> list[str]:
    """Keys of the run: two pools, each on half of the nodes."""
    num_prompts = num_ranks * SAMPLES_A_RANK // SAMPLES_A_PROMPT
    half = "[" + ",".join([str(ON_NODE)] * (num_ranks // 2 // ON_NODE)) + "]"
    policy = "actor_rollout_ref"
    return [
        *("trainer.backend=ray", "ray.address=simulated", "trainer.device=cpu"),
        f"resource_pool_spec={{policy: {half}, value: {half}}}",
        "role_mapping={actor_rollout: policy, ref: policy, critic: value, reward_model: value}",
        *(f"{policy}.model.path={tiny}/model", f"data.train_files={tiny}/train.parquet"),
        *(f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}"),
        *(f"data.train_batch_size={num_prompts}", f"{policy}.rollout.n={SAMPLES_A_PROMPT}"),
        f"{policy}.actor.ppo_mini_batch_size={num_prompts // 2}",
        *("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"),
        *("reward_model.enable=true", f"reward_model.model.path={tiny}/judge"),
        *("data.val_files=null", f"trainer.default_local_dir={folder}"),
        *(f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}"),
        "trainer.save_final=false",
    ]


def run(num_ranks: int, tp: int, steps: int, folder: Path, tiny: Path) -> dict[str, float]:
    """A run's steps; the numbers of a step, and of the run."""
    config = load_config(settings(folder, tiny, num_ranks, steps))
    SimulatedPools.tp, SimulatedPools.far_ends = tp, FarEnds()
    nodes = [Node(f"node-{n}", ON_NODE, 64.0, key=f"{n}") for n in range(num_ranks // ON_NODE)]
    pretended = {
        "find_nodes": lambda *_: nodes,
        "require_shared_folder": lambda *_: None,
        "PoolStarter": SimulatedPools,
    }
    with ExitStack() as at_end:
        at_end.enter_context(mock.patch.multiple(worker_groups, **pretended))
        lock = at_end.enter_context(FolderLock(folder))
        inputs = Measured.prepare(config, at_end)
        open_run_folder(config, lock)
        note_start(folder)
        before_mib = rss_mib()
        groups = at_end.enter_context(WorkerGroups(config))
        groups.note_placement()
        show_plan(groups.placement, config, Measured)
        trainer = Measured(config, groups, *inputs)
        Measured.gauge = gauge = Gauge(SimulatedPools.far_ends)
        trainer.callbacks = [gauge]
        trainer.fit()
    found = gauge.end()
    stages = {
        f"{stage} s": statistics.median(own[1:])
        for stage, own in Measured.cpu_of.items()
        if own[1:]
    }
    saved = Measured.cpu_of["save_checkpoint"][-1]
    return found | stages | {"checkpoint s": saved, "MiB": rss_mib() - before_mib}


def rss_mib() -> float:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print the numbers as JSON, the last line."""
    num_ranks, tp, steps = map(int, sys.argv[1:4])
    folder, profiles = sys.argv[4], sys.argv[5] == "True"
    torch.set_num_threads(1)
    profile = cProfile.Profile(time.process_time)
    with tempfile.TemporaryDirectory() as own:
        tiny = make_inputs(Path(own), 2 * num_ranks)
        if profiles:
            profile.enable()
        found: dict[str, Any] = run(num_ranks, tp, steps, Path(folder or f"{own}/run"), tiny)
    if profiles:
        profile.disable()
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(40)
        found["profile"] = text.getvalue()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
