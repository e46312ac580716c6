"""Measurements on one device, one part per process: the parts of `gpu.sh` that are not whole runs.

    python benchmarks/gpu_side.py PART [--device cuda|cpu] [--tiny] [--out FILE]

Each part is a generator of (name, value) pairs. FILE is rewritten after every pair, so the results
of a part that is stopped are kept. Models get random weights from a seed, drawn on the device, so
only a config.json is read from disk. Neither Ray nor vLLM is imported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_models import decoded_bytes, write_configs
from sides import actor_worker, full_rows

Figure = tuple[str, float | str]
GIB = 2**30


@dataclass(frozen=True)
class Trial:
    """The device, and whether the sizes are reduced for a trial on a CPU."""

    device: str
    tiny: bool
    models: Path

    @property
    def lengths(self) -> tuple[int, int]:
        """Prompt and response tokens of a row in an update; a full pass has no padding."""
        return (16, 48) if self.tiny else (256, 768)

    def model(self, size: str) -> Path:
        """Return the folder with the configuration of a model."""
        return self.models / size

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int) -> float:
        """Return the median time of `repeats` runs, after one to warm up."""
        times = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])


def data_sheet() -> Any:
    """Return the data sheet of the GPU, or None."""
    from trainer.planner.cost import data_sheet as sheet_of

    return sheet_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


@contextmanager
def weights_from_a_seed() -> Iterator[None]:
    """Context in which new engines draw their weights on the device, from a seed."""
    from workers.models.load import materialize
    from workers.parallel.placements import local_part

    @torch.no_grad()
    def draw(module: Any, config: Any, head: str, device: torch.device, whole: Any = None) -> None:
        materialize(module, device)
        torch.manual_seed(0)
        for name, weight in module.named_parameters():
            shard = local_part(weight)  # a DTensor would draw other numbers than a plain tensor
            if weight.dim() > 1:
                shard.normal_(0, 0.02)
            else:
                shard.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    with patch("workers.training.build.load_weights", draw):
        yield


@contextmanager
def sharded_over_one_rank() -> Iterator[None]:
    """Context in which new engines use FSDP2 even on a single rank."""
    import torch.distributed as dist

    from workers.parallel.groups import RankGroups

    plain = RankGroups.__init__

    def with_a_loss_group(self: RankGroups, *args: Any) -> None:
        plain(self, *args)
        self.loss = dist.group.WORLD

    with patch.object(RankGroups, "__init__", with_a_loss_group):
        yield


def actor(trial: Trial, size: str, tokens: int, mini_batch: int, **settings: Any) -> Any:
    """Return a policy with an optimizer, which computes in bfloat16 over float32 weights."""
    from workers.config import ActorRolloutRefConfig, ModelConfig, OptimConfig, RolloutConfig

    strategy = settings.pop("strategy", "fsdp")
    prompt, response = settings.pop("lengths", trial.lengths)
    model = ModelConfig(
        path=str(trial.model(size)),
        random_init_seed=0,
        compute_dtype="bfloat16",
        **{"compile": "off", "enable_gradient_checkpointing": True, **settings},
    )
    policy = ActorRolloutRefConfig(model=model, rollout=RolloutConfig(n=1))
    policy.actor.optim = OptimConfig(lr=1e-5)
    policy.actor.strategy = strategy
    policy.actor.ppo_mini_batch_size = mini_batch
    policy.actor.use_dynamic_bsz = True
    policy.actor.ppo_max_token_len_per_gpu = tokens
    worker = actor_worker(policy, trial.device, prompt, response)
    with weights_from_a_seed():
        worker.init_model(100)
    return worker


def rows(trial: Trial, num_rows: int, lengths: tuple[int, int] | None = None) -> Any:
    """Return rows of full length with every column that an update of the actor reads."""
    from verl_like.batch.protocol import DataProto

    prompt, response = lengths or trial.lengths
    words = range(6, 500 if trial.tiny else 150_000)
    drawn = ("advantages", "old_log_probs")
    return DataProto.from_dict(
        full_rows(num_rows, prompt, response, words, drawn, -math.log(len(words)))
    )


# ---------------------------------------------------------------------------------------------
# The parts
# ---------------------------------------------------------------------------------------------


def machine(trial: Trial) -> Iterator[Figure]:
    """Yield facts on which all other results depend."""
    yield "python", platform.python_version()
    for package in ("torch", "transformers", "triton", "ray", "vllm", "flash-attn-4", "flash-attn"):
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
    yield "cores", len(os.sched_getaffinity(0))
    if trial.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        yield "device", properties.name
        yield "memory GiB", properties.total_memory / GIB
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        yield "driver", done.stdout.strip() or "unknown"
        size = 8192
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        yield "bf16 product TFLOP/s", 2 * size**3 / trial.seconds(lambda: a @ b, 10) / 1e12
        source = torch.randn(2**29, device="cuda")
        target = torch.empty_like(source)
        copied = 2 * source.nbytes / trial.seconds(lambda: target.copy_(source), 10)
        yield "memory GB/s", copied / 1e9


def local_rank_trap(trial: Trial) -> Iterator[Figure]:
    """Yield what DeviceMesh does with LOCAL_RANK=3 and one visible GPU, without our worker."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    os.environ |= {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0"}
    backend = "cpu:gloo,cuda:nccl" if trial.device == "cuda" else "cpu:gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        init_device_mesh(trial.device, (1,))
    except RuntimeError as error:
        yield "init_device_mesh", str(error).splitlines()[0][:120]
    else:
        yield "init_device_mesh", "works"


def local_rank_fixed(trial: Trial) -> Iterator[Figure]:
    """Yield the same in our worker: local rank 3 of 8, one visible GPU, a collective."""
    import torch.distributed as dist

    from verl_like.process.info import ProcessInfo
    from verl_like.process.worker import Worker, construction
    from workers.parallel.dims import ParallelDims
    from workers.parallel.groups import RankGroups

    os.environ |= {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0"}
    facts = ProcessInfo(local_rank=3, local_world_size=8, device_kind=trial.device)
    with construction(facts, {}):
        worker = Worker()
    worker.open_process_group()
    groups = RankGroups(ParallelDims(), worker.device)
    ones = torch.ones(8, device=worker.device)
    dist.all_reduce(ones, group=groups.mesh.get_group("shard"))
    yield "device", str(ones.device)
    yield "sum", float(ones.sum())


def fsdp(trial: Trial) -> Iterator[Figure]:
    """Compare FSDP2 on a mesh of one rank, which runs most of its code, with a plain module."""
    size, mini_batch, tokens = "0.5b", 2 if trial.tiny else 8, 4096
    data = rows(trial, mini_batch)
    begin = time.perf_counter()
    worker = actor(trial, size, tokens, mini_batch)
    yield "build, plain, s", time.perf_counter() - begin
    log_probs = worker.compute_log_prob(data)[0].batch["old_log_probs"]
    metrics = worker.update_actor(data)
    yield "grad norm, plain", metrics["actor/grad_norm"]
    yield "update, plain, s", trial.seconds(partial(worker.update_actor, data), 3)
    del worker
    free(trial)

    for strategy in ("fsdp", "shard_grad_op", "fsdp_offload"):
        begin = time.perf_counter()
        with sharded_over_one_rank():
            worker = actor(trial, size, tokens, mini_batch, strategy=strategy)
        yield f"build, {strategy}, s", time.perf_counter() - begin
        gap = (worker.compute_log_prob(data)[0].batch["old_log_probs"] - log_probs).abs().max()
        yield f"largest log-prob difference, {strategy}", float(gap)
        metrics = worker.update_actor(data)
        yield f"grad norm, {strategy}", metrics["actor/grad_norm"]
        yield f"update, {strategy}, s", trial.seconds(partial(worker.update_actor, data), 3)

    engine = worker.engine
    begin = time.perf_counter()
    num_bytes = sum(t.nbytes for _, t in engine.named_full_tensors(dtype=torch.bfloat16))
    trial.synchronize()
    yield "gather of offloaded weights, GB/s", num_bytes / (time.perf_counter() - begin) / 1e9
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        worker.save_checkpoint(f"{folder}/actor", 1)
        yield "checkpoint written, s", time.perf_counter() - begin
        before = worker.weights_checksum()
        worker.update_actor(data)
        begin = time.perf_counter()
        worker.load_checkpoint(f"{folder}/actor")
        yield "checkpoint read, s", time.perf_counter() - begin
        yield "weights after reading are", "equal" if worker.weights_checksum() == before else "OFF"


def memory(trial: Trial) -> Iterator[Figure]:
    """Compare predicted, allocated and reserved memory of an update, for several settings."""
    from workers.config import WorkersConfig
    from workers.memory import LargestPass, memory_of

    lengths = (64, 128) if trial.tiny else (4096, 8192, 16384)
    for size in ("1.5b", "7b-8-layers"):
        for recompute in (True, False):
            worker = actor(trial, size, 0, 0, enable_gradient_checkpointing=recompute)
            role_model = worker.role_model(
                WorkersConfig(
                    actor_rollout_ref=worker.policy, data=None, trainer=None, algorithm=None
                )
            )
            for tokens in lengths:
                num_rows = 2 * tokens // sum(trial.lengths)
                worker.budget = replace(worker.budget, tokens=tokens)
                worker.config.ppo_mini_batch_size = num_rows
                name = f"{size}, {tokens} tokens{', recomputed' * recompute}"
                largest = LargestPass(tokens, num_rows // 2 * trial.lengths[1])
                predicted = memory_of(role_model, "actor", "pool", 1, trial.device, largest)
                yield f"{name}: predicted GiB", (predicted.resident + predicted.call) / GIB
                if trial.device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                try:
                    seconds = trial.seconds(partial(worker.update_actor, rows(trial, num_rows)), 1)
                except torch.OutOfMemoryError:
                    yield f"{name}: allocated GiB", "out of memory"
                    continue
                if trial.device == "cuda":
                    yield f"{name}: allocated GiB", torch.cuda.max_memory_allocated() / GIB
                    yield f"{name}: reserved GiB", torch.cuda.max_memory_reserved() / GIB
                yield f"{name}: s", seconds
            del worker
            free(trial)


def updates(trial: Trial, cases: dict[str, dict[str, Any]]) -> Iterator[Figure]:
    """Yield the MFU of an update, by default of the 1.5B model."""
    from workers.training.mfu import needed_flops, peak_flops

    mini_batch = 4 if trial.tiny else 32
    for name, settings in cases.items():
        begin = time.perf_counter()
        settings = {"size": "1.5b", "tokens": 16384, "mini_batch": mini_batch, **settings}
        worker = actor(trial, **settings)
        data = rows(trial, mini_batch)
        worker.update_actor(data)
        trial.synchronize()
        yield f"{name}: built, and first update, s", time.perf_counter() - begin
        kernel = worker.engine.kernel
        yield f"{name}: attention", kernel.name if kernel else "no varlen kernel"
        if settings.get("compile") == "on":
            yield f"{name}: compiled", str(worker.engine.is_compiled)
        if trial.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = trial.seconds(partial(worker.update_actor, data), 1 if trial.tiny else 3)
        rate = needed_flops(worker.engine, True) / seconds
        yield f"{name}: s", seconds
        yield f"{name}: tokens/s", mini_batch * sum(trial.lengths) / seconds
        yield f"{name}: TFLOP/s", rate / 1e12
        if peak := peak_flops(torch.device(trial.device)):
            yield f"{name}: MFU", rate / peak
            yield f"{name}: peak GiB", torch.cuda.max_memory_allocated() / GIB
        del worker
        free(trial)


def shared_prefixes(trial: Trial) -> Iterator[Figure]:
    """Compare updates on samples of the same prompts, with prefixes computed once and per row."""
    prompts, samples, lengths = (2, 2, (16, 16)) if trial.tiny else (4, 8, (1024, 512))
    data = rows(trial, prompts * samples, lengths)
    for column in ("input_ids", "prompts"):
        ids = data.batch[column]
        first = ids.view(prompts, samples, -1)[:, :1, : lengths[0]]
        ids[:, : lengths[0]] = first.expand(-1, samples, -1).reshape(-1, lengths[0])
    log_probs, seconds = [], []
    for name, shares in {"shared": True, "per row": False}.items():
        worker = actor(trial, "1.5b", 16384, len(data), share_prefixes=shares, lengths=lengths)
        log_probs.append(worker.compute_log_prob(data)[0].batch["old_log_probs"])
        yield f"{name}: grad norm", worker.update_actor(data)["actor/grad_norm"]
        if trial.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds.append(trial.seconds(partial(worker.update_actor, data), 2))
        yield f"{name}: s", seconds[-1]
        if trial.device == "cuda":
            yield f"{name}: peak GiB", torch.cuda.max_memory_allocated() / GIB
        del worker
        free(trial)
    yield "shared of per row", seconds[0] / seconds[1]
    yield "largest log-prob difference", float((log_probs[0] - log_probs[1]).abs().max())


def full_gpu(trial: Trial) -> Iterator[Figure]:
    """Update with passes that fit, and with passes that must be repeated in smaller ones."""
    data = rows(trial, 32)
    taken = 0
    for name, tokens in {"4,096 tokens per pass": 4096, "32,768, which do not fit": 32768}.items():
        worker = actor(trial, "0.5b", tokens, 32, enable_gradient_checkpointing=False)
        if taken:
            limit = (taken + 2 * GIB) / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(limit)
        yield f"{name}: grad norm", worker.update_actor(data)["actor/grad_norm"]
        yield f"{name}: s", trial.seconds(partial(worker.update_actor, data), 1)
        taken = torch.cuda.max_memory_allocated()
        yield f"{name}: peak GiB", taken / GIB
        del worker
        free(trial)


def profile(trial: Trial) -> Iterator[Figure]:
    """Yield the GPU time of an update by operation, and the allocations at the memory peak."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    mini_batch = 4 if trial.tiny else 32
    worker = actor(trial, "1.5b", 16384, mini_batch, compile="auto")
    data = rows(trial, mini_batch)
    worker.update_actor(data)
    kind = ProfilerActivity.CUDA if trial.device == "cuda" else ProfilerActivity.CPU
    begin = time.perf_counter()
    with profiler(activities=[kind]) as trace:
        worker.update_actor(data)
        trial.synchronize()
        seconds = time.perf_counter() - begin
    yield "profiled update, s", seconds
    calls: dict[str, list[int]] = {}
    for event in trace.profiler.kineto_results.events():  # `key_averages` takes minutes
        if event.device_type().name == trial.device.upper():
            calls.setdefault(event.name(), []).append(event.duration_ns())
    yield f"{trial.device} busy, s", sum(map(sum, calls.values())) / 1e9
    for name, times in sorted(calls.items(), key=lambda item: -sum(item[1]))[:40]:
        yield name[:100].replace(": ", ":"), f"{sum(times) / 1e6:.1f} ms in {len(times)} calls"
    del worker
    free(trial)
    if trial.device == "cuda":
        yield from peak(trial, "1.5b", 4096, 8)


def peak(trial: Trial, size: str, tokens: int, mini_batch: int) -> Iterator[Figure]:
    """Yield the largest allocations at the memory peak of an update, by where they were made."""
    worker = actor(trial, size, tokens, mini_batch)
    data = rows(trial, mini_batch)
    worker.update_actor(data)
    torch.cuda.memory._record_memory_history(max_entries=500_000, stacks="python")
    worker.update_actor(data)
    trial.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    alive: dict[int, tuple[int, str]] = {}
    now = most = 0
    at_peak: dict[int, tuple[int, str]] = {}
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            lines = [
                f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
                for frame in event.get("frames", [])
                if "/torch/" not in frame["filename"]
            ]
            alive[event["addr"]] = event["size"], " < ".join(lines[:3])
            now += event["size"]
            if now > most:
                most, at_peak = now, dict(alive)
        elif event["action"] == "free_completed" and event["addr"] in alive:
            now -= alive.pop(event["addr"])[0]
    yield f"peak of {size}: above what stays, GiB", most / GIB
    places: dict[str, int] = {}
    for num_bytes, place in at_peak.values():
        places[place] = places.get(place, 0) + num_bytes
    for place, num_bytes in sorted(places.items(), key=lambda item: -item[1])[:12]:
        yield f"peak of {size}: GiB from {place}", num_bytes / GIB


def mfu_eager(trial: Trial) -> Iterator[Figure]:
    """Yield the MFU of updates without a compiler, with and without recomputation."""
    yield from updates(
        trial, {"eager, recomputed": {}, "eager": {"enable_gradient_checkpointing": False}}
    )


def mfu_compiled(trial: Trial) -> Iterator[Figure]:
    """Yield the MFU of updates through compiled layers."""
    yield from updates(
        trial,
        {
            "compiled, recomputed": {"compile": "on"},
            "7B, 8 layers, compiled, recomputed": {"compile": "on", "size": "7b-8-layers"},
        },
    )


def micro(trial: Trial) -> Iterator[Figure]:
    """Time hashing, sampling and copies to the host: the work of a step besides the model."""
    from workers.rollout.base import SamplingParams
    from workers.rollout.sampling import sample_tokens
    from workers.weights.checksum import float32_hash

    tensor = torch.ones(2**20 if trial.tiny else 2**28, device=trial.device, dtype=torch.bfloat16)
    repeats = 1 if trial.tiny else 28
    seconds = trial.seconds(lambda: [float32_hash(tensor) for _ in range(repeats)], 1)
    yield "hash of bfloat16 weights, GB/s", repeats * tensor.nbytes / seconds / 1e9

    num_rows, vocabulary = (8, 512) if trial.tiny else (256, 151936)
    logits = torch.randn(num_rows, vocabulary, device=trial.device)
    noise = torch.rand(num_rows, dtype=torch.float64, device=trial.device)
    for name, settings in {
        "plain": {},
        "top-p 0.9": {"top_p": 0.9},
        "top-k 50": {"top_k": 50},
        "min-p 0.05": {"min_p": 0.05},
        "greedy": {"do_sample": False},
    }.items():
        sampling = SamplingParams(max_tokens=1, stop_token_ids=(), **settings)
        if trial.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        seconds = trial.seconds(partial(sample_tokens, logits, noise, sampling), 5)
        yield f"sampling of {num_rows} rows, {name}, ms", 1e3 * seconds
        if trial.device == "cuda":
            taken = torch.cuda.max_memory_allocated() - before
            yield f"sampling of {num_rows} rows, {name}, GiB", taken / GIB

    if trial.device == "cuda":
        source = torch.ones(2**31, dtype=torch.uint8, device="cuda")
        for name, pinned in {"pageable": False, "pinned": True}.items():
            host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=pinned)
            seconds = trial.seconds(partial(host.copy_, source, non_blocking=True), 3)
            yield f"copy to {name} memory, GB/s", source.nbytes / seconds / 1e9
            seconds = trial.seconds(partial(source.copy_, host, non_blocking=True), 3)
            yield f"copy from {name} memory, GB/s", source.nbytes / seconds / 1e9


def decode(trial: Trial) -> Iterator[Figure]:
    """Yield the bytes read per token by the native engine, relative to the memory bandwidth."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from workers.rollout.base import EngineLimits, SamplingParams
    from workers.rollout.native.engine import NativeRolloutEngine
    from workers.rollout.sample import Sample

    sheet = data_sheet()
    prompt, response = (8, 8) if trial.tiny else (128, 256)
    folder = trial.model("0.5b")
    torch.manual_seed(0)
    with torch.device(trial.device):
        module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        ).eval()
    for num_rows in (8,) if trial.tiny else (64, 256):
        limits = EngineLimits(prompt, response, max_num_seqs=num_rows)
        engine = NativeRolloutEngine(module, limits, owns_weights=False)
        engine.commit(0)
        ids = torch.randint(6, module.config.vocab_size, (num_rows, prompt)).tolist()
        samples = [Sample(row, key) for key, row in enumerate(ids)]
        sampling = SamplingParams(max_tokens=response, stop_token_ids=())
        seconds = trial.seconds(partial(engine.generate, samples, sampling), 1)
        yield f"{num_rows} rows: tokens/s", num_rows * response / seconds
        yield f"{num_rows} rows: ms per step", 1e3 * seconds / response
        rate = decoded_bytes(folder, num_rows, prompt, response) / seconds
        yield f"{num_rows} rows: GB/s", rate / 1e9
        if sheet:
            yield f"{num_rows} rows: share of bandwidth", rate / sheet.memory_bandwidth


def free(trial: Trial) -> None:
    """Free the memory that is no longer referenced."""
    import gc

    gc.collect()
    if trial.device == "cuda":
        torch.cuda.empty_cache()


PARTS: dict[str, Callable[[Trial], Iterator[Figure]]] = {
    "machine": machine,
    "trap": local_rank_trap,
    "fixed": local_rank_fixed,
    "fsdp": fsdp,
    "memory": memory,
    "prefixes": shared_prefixes,
    "full": full_gpu,
    "mfu": mfu_eager,
    "compiled": mfu_compiled,
    "profile": profile,
    "micro": micro,
    "decode": decode,
}


def main() -> None:
    """Run one part and write its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(options.device, options.tiny, Path(folder))
        write_configs(trial.models, options.tiny)
        for name, value in PARTS[options.part](trial):
            figures[name] = value
            print(f"{name}: {value}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(figures), encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
