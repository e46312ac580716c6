"""Measure one GPU in two calls, with the roofline's prediction next to each figure (`gpu.sh`).

    python benchmarks/gpu_run.py 1 --out FOLDER     # the parts of the first call, at most 420 s
    python benchmarks/gpu_run.py 2 --out FOLDER
    python benchmarks/gpu_run.py predict --out FOLDER

Parts run in one process, the most informative per second first. If a part raises an error, it ends,
and the next one begins. If it is late or takes the process with it, a new process runs the rest.
FOLDER gets a line in figures.jsonl per figure, a table in gpu.md, and all output in gpu.log.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import platform
import pstats
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu_models import CACHE_GIB, VOCABULARY, Job, actor_of, config_of, rows_of, write_model
from sides import HERE

GIB = 2**30
Figure = tuple[str, Any, str]
"""Name, value and unit."""
PREDICTIONS = "predictions.json"
NEVER_MEASURED = (
    "several GPUs (FSDP2, NCCL, deliveries between GPUs)",
    "Ray on GPUs",
    "vLLM on a GPU",
    "flash-attn",
    "whole models above 3B",
)
LOCKED_COPY = 55e9
"""Bytes per second of a copy to page-locked memory, as an H100 measured it."""


@dataclass(frozen=True)
class Trial:
    """The device, and whether sizes are reduced for a trial on a CPU."""

    device: str
    tiny: bool
    folder: Path

    @cached_property
    def kind(self) -> str:
        """Return the GPU whose predictions apply, by its memory."""
        import torch

        has_more = self.device == "cuda" and torch.cuda.mem_get_info()[1] > 100 * GIB
        return "H200" if has_more else "H100"

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int = 3) -> float:
        """Return the median time of `repeats` runs, after one to warm up; tiny runs are not timed
        well.
        """
        times = [0.0] * self.tiny
        for _ in range(1 if self.tiny else repeats + 1):
            begin = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    def peaks(self) -> tuple[float, float]:
        """Return the peaks of allocated and reserved memory in GiB, and begin new ones."""
        import torch

        if self.device == "cpu":
            return 0.0, 0.0
        peaks = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        torch.cuda.reset_peak_memory_stats()
        return peaks


# ---------------------------------------------------------------------------------------------
# What is predicted and measured
# ---------------------------------------------------------------------------------------------


def jobs_of(part: str, kind: str, tiny: bool) -> dict[str, Job]:
    """Return the updates of a part by the names of their figures."""
    length, jobs = 1536, dict[str, Job]()
    if part == "prefixes":
        for share, shares in product((25,) if tiny else (25, 60, 45, 10), (True, False)):
            prompt = round(share / 100 * length * 8 / 7)
            rows = "computed once" if shares else "each row alone"
            jobs[f"{share} % of tokens in shared prefixes, {rows}"] = Job(
                "1.5b", 16, prompt, length - prompt, same_prompts=8, shares=shares
            )
    elif part in ("1.5B", "7B"):
        # weights, moments and activations of 14 layers of 7B fit an H200, those of 8 an H100
        layers = 28 if part == "1.5B" else {"H100": 8, "H200": 14}[kind]
        for recomputed in (layers, layers // 2, 0):
            name = f"{recomputed} of {layers} layers recomputed"
            jobs[name] = Job(part.lower(), compiled=True, recomputes=recomputed, layers=layers)
    elif part == "0.5B":
        jobs["update of 256 rows"] = Job("0.5b", 256, 384, 510, compiled=True, same_prompts=4)
    if tiny:
        small = {"size": "tiny", "rows": 4, "tokens": 256, "layers": 2}
        return {
            name: replace(
                job,
                **small,
                prompt=job.prompt // 64 + 4,
                response=job.response // 64 + 4,
                same_prompts=min(2, job.same_prompts),
                recomputes=min(job.recomputes, 2),
                compiled=False,
            )
            for name, job in jobs.items()
        }
    return jobs


UPDATES = ("prefixes", "1.5B", "7B", "0.5B")
SAMPLING: dict[str, dict[str, Any]] = {"plain": {}, "top-p 0.9": {"top_p": 0.9}}
CACHED = (384, 1024)


def decoding(tiny: bool, cached: int) -> tuple[str, int, int]:
    """Return the model, the rows and the cached tokens per row of a measurement of decoding."""
    return ("tiny", 4, cached // 64) if tiny else ("0.5b", 256, cached)


def predict(tiny: bool) -> dict[str, dict[str, float]]:
    """Return predicted figures by "part: name", for each kind of GPU."""
    import roofline

    h100 = roofline.H100
    # the copy rates of both machines, 4.3 and 2.99 TB/s
    gpus = {"H100": h100, "H200": replace(h100, memory=h100.memory * 4.3 / 2.99)}
    predictions: dict[str, dict[str, float]] = {kind: {} for kind in gpus}
    for kind, part in product(gpus, UPDATES):
        for name, job in jobs_of(part, kind, tiny).items():
            if kind == "H200" and part != "7B":
                continue
            recorder = roofline.record(job, "update")
            for other in gpus if part != "7B" else (kind,):
                seconds = recorder.seconds(gpus[other], job.compiled)
                predictions[other][f"{part}: {name}"] = seconds
    tokens = {cached: roofline.decoded_token(*decoding(tiny, cached)) for cached in (*CACHED, 640)}
    with roofline.OperationRecorder() as hashing:
        published(roofline.META, 0, "tiny" if tiny else "7b")
    samplings = {}
    for num_rows, (name, settings) in product((64, 256, 1024), SAMPLING.items()):
        with roofline.OperationRecorder() as samplings[f"sampling: {num_rows} rows, {name}"]:
            roofline.sample(num_rows, **settings)
    for kind, gpu in gpus.items():
        seconds = predictions[kind]
        for cached in CACHED:
            seconds[f"decode: token after {cached}"] = 1e3 * tokens[cached].seconds(gpu)
        seconds["GRPO: generation"] = 510 * tokens[640].seconds(gpu)
        seconds["GRPO: update"] = seconds["0.5B: update of 256 rows"]
        for name, recorder in samplings.items():
            seconds[name] = 1e3 * recorder.seconds(gpu)
        copied = published_bytes("tiny" if tiny else "7b") / LOCKED_COPY
        seconds["publish: hashed on the GPU"] = copied + hashing.seconds(gpu)
        seconds["publish: hashed on the host"] = copied * 0.33 / (2.8e9 / LOCKED_COPY)
    return predictions


# ---------------------------------------------------------------------------------------------
# The parts
# ---------------------------------------------------------------------------------------------


def machine(trial: Trial) -> Iterator[Figure]:
    """Yield facts on which all other results depend."""
    import torch

    yield "python", platform.python_version(), ""
    for package in (
        "torch",
        "transformers",
        "triton",
        "ray",
        "vllm",
        "flash-attn-4",
        "flash-attn",
        "tensordict",
    ):
        try:
            yield package, version(package), ""
        except PackageNotFoundError:
            yield package, "not installed", ""
    yield "cores", len(os.sched_getaffinity(0)), ""
    if trial.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        yield "device", properties.name, ""
        yield "memory", properties.total_memory / GIB, "GiB"
    size = 128 if trial.tiny else 8192
    a, b = (torch.randn(size, size, device=trial.device).bfloat16() for _ in range(2))
    yield "bfloat16 product", 2 * size**3 / trial.seconds(lambda: a @ b, 10) / 1e12, "TFLOP/s"
    source = torch.randn(2**16 if trial.tiny else 2**30, device=trial.device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / trial.seconds(lambda: target.copy_(source), 10)
    yield "copy within the device", copied / 1e9, "GB/s"
    number = torch.zeros(1, device=trial.device)
    begin = time.perf_counter()
    for _ in range(1000):
        number.add_(1)
    yield "start of an operation", 1e3 * (time.perf_counter() - begin), "us"


@contextmanager
def weights_from_a_seed() -> Iterator[None]:
    """Context in which new engines draw their weights on the device, from a seed."""
    import torch

    from workers.models.load import materialize

    @torch.no_grad()
    def draw(module: Any, config: Any, head: str, device: Any, whole: Any = None) -> None:
        materialize(module, device)
        torch.manual_seed(0)
        for name, weight in module.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02)
            else:
                weight.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    with patch("workers.training.build_model.load_weights", draw):
        yield


def built(trial: Trial, job: Job) -> Any:
    """Return the actor of a job with its model."""
    worker = actor_of(trial.folder, job, trial.device)
    with weights_from_a_seed():
        worker.init_model(100)
    return worker


def set_job(engine: Any, job: Job) -> None:
    """Let a model share prefixes and recompute layers as the job does."""
    from workers.models.causal_lm import checkpointed_layers

    engine.row_passes = replace(engine.row_passes, shares=job.shares)
    for number, layer in enumerate(checkpointed_layers(engine.module)):
        layer.gradient_checkpointing = job.recomputes is True or number < job.recomputes


def updates(trial: Trial, part: str) -> Iterator[Figure]:
    """Yield the time of each update of a part, and where the last one leaves the GPU idle."""
    import torch

    from workers.training.mfu import needed_flops, peak_flops

    jobs = jobs_of(part, trial.kind, trial.tiny)
    begin, worker, log_probs = time.perf_counter(), None, None
    for name, job in jobs.items():
        if worker is None:
            worker = built(trial, job)
        engine, data = worker.engine, rows_of(job)
        set_job(engine, job)
        worker.update_actor(data)
        trial.synchronize()
        yield f"{name}: until its first update ended", time.perf_counter() - begin, "s"
        trial.peaks()
        seconds = trial.seconds(partial(worker.update_actor, data), 2)
        yield name, seconds, "s"
        if peak := peak_flops(torch.device(trial.device)):
            yield f"{name}: MFU", needed_flops(engine, True) / seconds / peak, ""
            yield f"{name}: allocated", trial.peaks()[0], "GiB"
        if engine.smaller_budgets:
            yield f"{name}: did not fit, repeated with", str(engine.smaller_budgets), ""
            engine.smaller_budgets.clear()
        if part == "prefixes":
            before, log_probs = log_probs, worker.compute_log_prob(data)[0].batch["old_log_probs"]
            if not job.shares:
                gap = float((log_probs - before).abs().max())
                yield f"{name}: largest difference of log-probs", gap, ""
        begin = time.perf_counter()
    yield "attention", engine.kernel.name if engine.kernel else "no varlen kernel", ""
    yield from profile(trial, partial(worker.update_actor, data))


def profile(trial: Trial, run: Callable[[], Any]) -> Iterator[Figure]:
    """Yield the device's time by kernel, and its idle time by the kernel before which it waits."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    kind = ProfilerActivity.CUDA if trial.device == "cuda" else ProfilerActivity.CPU
    with profiler(activities=[kind]) as trace:
        run()
        trial.synchronize()
    spans = sorted(
        (event.start_ns(), event.duration_ns(), event.name())
        for event in trace.profiler.kineto_results.events()
        if event.device_type().name == trial.device.upper() and "#" not in event.name()
    )
    idle: dict[str, int] = defaultdict(int)
    busy: dict[str, int] = defaultdict(int)
    end = spans[0][0] if spans else 0
    for start, duration, name in spans:
        if start > end:
            idle[name] += start - end
        busy[name] += max(0, start + duration - max(start, end))
        end = max(end, start + duration)
    yield "profile: busy", sum(busy.values()) / 1e9, "s"
    yield "profile: idle", sum(idle.values()) / 1e9, "s"
    for title, times in (("idle before", idle), ("busy in", busy)):
        for name, duration in sorted(times.items(), key=lambda item: -item[1])[:8]:
            yield f"profile: {title} {name[:70]}", duration / 1e6, "ms"


def sampling(trial: Trial) -> Iterator[Figure]:
    """Time the sampler."""
    import torch

    from workers.rollout.base import SamplingParams
    from workers.rollout.sampling import sample_tokens

    for num_rows, (name, settings) in product((64, 256, 1024), SAMPLING.items()):
        logits = torch.randn(num_rows, 64 if trial.tiny else VOCABULARY, device=trial.device)
        noise = torch.rand(num_rows, dtype=torch.float64, device=trial.device)
        params = SamplingParams(max_tokens=1, stop_token_ids=(), **settings)
        seconds = trial.seconds(partial(sample_tokens, logits, noise, params), 5)
        yield f"{num_rows} rows, {name}", 1e3 * seconds, "ms"


def decode(trial: Trial) -> Iterator[Figure]:
    """Time one more token of every row in the native engine, and profile it."""
    import torch
    from transformers import AutoModelForCausalLM

    from workers.rollout.base import EngineLimits, SamplingParams
    from workers.rollout.native.engine import NativeRolloutEngine
    from workers.rollout.sample import Sample

    for cached in CACHED:
        size, num_rows, prompt = decoding(trial.tiny, cached)
        torch.manual_seed(0)
        with torch.device(trial.device):
            module = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16).eval()
        limits = EngineLimits(prompt, 512, max_num_seqs=num_rows, kv_cache_gib=CACHE_GIB)
        engine = NativeRolloutEngine(module, limits, owns_weights=False)
        engine.commit(0)
        samples = [Sample([6 + key % 64] * prompt, key) for key in range(num_rows)]

        def generate(count: int, engine: Any = engine, samples: Any = samples) -> None:
            params = SamplingParams(max_tokens=count, stop_token_ids=())
            engine.generate(samples, params)

        few, many = (trial.seconds(partial(generate, count), 2) for count in (4, 36))
        yield f"token after {cached}", 1e3 * (many - few) / 32, "ms"
    yield from profile(trial, partial(generate, 8))


def grpo(trial: Trial) -> Iterator[Figure]:
    """Run two steps of GRPO with the native engine; profile the engine's Python in the first."""
    from trainer.cli.main import RECIPES
    from trainer.config.compose import load_config
    from trainer.launch import run
    from verl_like.registry import load_object
    from workers.rollout.native.engine import NativeRolloutEngine

    size, prompt, response, prompts = ("tiny", 16, 8, 4) if trial.tiny else ("0.5b", 512, 510, 64)
    write_model(trial.folder, size, prompt)
    reward, results = trial.folder / "reward.py", trial.folder / "run"
    reward.write_text("def score(response):\n    return len(response) % 10 / 10\n", "utf-8")
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    keys = [
        "algorithm=grpo",
        f"actor_rollout_ref.model.path={trial.folder / size}",
        "actor_rollout_ref.model.random_init_seed=0",
        f"data.train_files={trial.folder / 'prompts.parquet'}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        f"data.train_batch_size={prompts}",
        f"{actor}.ppo_mini_batch_size={prompts}",
        f"{actor}.ppo_max_token_len_per_gpu={256 if trial.tiny else 16384}",
        f"{rollout}.n=4",
        f"{rollout}.name=native",
        f"reward.function.path={reward}",
        "reward.function.name=score",
        f"trainer.device={trial.device}",
        "trainer.backend=local",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        "trainer.save_final=false",
        "trainer.save_every_minutes=null",
        "trainer.max_restarts=0",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={results}",
    ]
    profiler, advance = cProfile.Profile(), NativeRolloutEngine._advance

    def profiled(self: Any, budget: Any) -> Any:
        is_first = not profiler.getstats()
        return profiler.runcall(advance, self, budget) if is_first else advance(self, budget)

    with patch.object(NativeRolloutEngine, "_advance", profiled):
        run(load_config(keys, load_object(RECIPES["ppo"], "ppo")))
    last = json.loads((results / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
    for name, metric in {"step": "step", "generation": "gen", "update": "update_actor"}.items():
        yield name, last[f"timing_s/{metric}"], "s"
    if profiler.getstats():
        stats: Any = pstats.Stats(profiler)
        slowest = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:12]
        for (file, line, function), (_, count, seconds, *_) in slowest:
            yield f"{Path(file).name}:{line} {function} ({count} calls)", seconds, "s"


def published_bytes(size: str) -> int:
    """Return the bytes of a model's weights in bfloat16."""
    return sum(2 * count for count in weight_sizes(size))


@cache
def weight_sizes(size: str) -> list[int]:
    """Return the number of elements of every weight."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(size))
    return [weight.numel() for weight in model.parameters()]


def published(device: Any, version: int, size: str, snapshot: Any = None, **more: Any) -> Any:
    """Publish a model's weights; without a snapshot, only hash them."""
    import torch

    from workers.models.tensor_files import byte_view
    from workers.weights.full_weights import hash_on_device

    largest = torch.zeros(max(weight_sizes(size)), dtype=torch.bfloat16, device=device)
    weights = [(str(n), largest[:count]) for n, count in enumerate(weight_sizes(size))]
    if snapshot is None:
        return [hash_on_device(byte_view(weight)) for _, weight in weights]
    return snapshot.fill(version, weights, 16.0, **more)


def publish(trial: Trial) -> Iterator[Figure]:
    """Time how long a trainer waits until a version of 7B is in host memory, with its hashes."""
    from workers.weights.host_copy import Snapshot

    size = "tiny" if trial.tiny else "7b"
    yield "weights", published_bytes(size) / 1e9, "GB"
    snapshot = Snapshot(on_gpu=trial.device == "cuda")
    for name, more in {"hashed on the GPU": {}, "hashed on the host": {"merging": {}}}.items():
        run = partial(published, trial.device, 0, size, snapshot, **more)
        yield name, trial.seconds(run, 2 if more else 3), "s"


def segments(trial: Trial) -> Iterator[Figure]:
    """Yield allocated and reserved memory of updates whose rows have unlike lengths."""
    job, scale = Job("1.5b", 16, tokens=8192, recomputes=False), 1
    if trial.tiny:
        job, scale = Job("tiny", 4, 4, 8, recomputes=False), 64
    worker = built(trial, job)
    for response in (768, 333, 1111):
        worker.update_actor(rows_of(replace(job, response=response // scale)))
        trial.synchronize()
    allocated, reserved = trial.peaks()
    yield "allocated", allocated, "GiB"
    yield "reserved", reserved, "GiB"


def gpu_tests(trial: Trial) -> Iterator[Figure]:
    """Run the tests with the marker `gpu`."""
    tests = ["weights/test_delivery.py"] if trial.tiny else ["training", "weights"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    paths = [f"tests/workers/{name}" for name in tests]
    done = subprocess.run(
        [*command, *paths], cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    yield "result", done.stdout.strip().splitlines()[-1].strip("= "), ""
    if done.returncode not in (0, 5):  # 5: no test was selected
        raise RuntimeError(f"pytest ended with {done.returncode}")


@dataclass(frozen=True)
class Part:
    """A part of a call."""

    name: str
    limit_s: int
    run: Callable[[Trial], Iterator[Figure]]
    segments: str = ""
    """Setting of torch's allocator; such a part has its own process."""


CALLS = {
    "1": [
        Part("machine", 15, machine),
        Part("prefixes", 80, partial(updates, part="prefixes")),
        Part("1.5B", 105, partial(updates, part="1.5B")),
        Part("7B", 105, partial(updates, part="7B")),
        Part("0.5B", 45, partial(updates, part="0.5B")),
        Part("sampling", 20, sampling),
    ],
    "2": [
        Part("decode", 45, decode),
        Part("GRPO", 80, grpo),
        Part("publish", 35, publish),
        Part("segments that grow", 20, segments, "expandable_segments:True"),
        Part("segments of fixed size", 20, segments, "expandable_segments:False"),
        Part("gpu tests", 45, gpu_tests),
    ],
}
LIMIT_S = {"1": 420, "2": 300}
START_S = 15
"""Time in which a process starts, beyond the limit of its first part."""


# ---------------------------------------------------------------------------------------------
# Running them
# ---------------------------------------------------------------------------------------------


def tell(**fact: Any) -> None:
    """Write a line that the first process reads."""
    print(f"\n@{json.dumps(fact)}", flush=True)


def run_parts(parts: list[Part], trial: Trial) -> None:
    """Run parts in this process; tell their figures and their errors."""
    import torch

    from workers.training.build_model import prepare_gpu_process

    if trial.device == "cuda":
        prepare_gpu_process()
    for part in parts:
        begin = time.monotonic()
        tell(part=part.name)
        error = ""
        try:
            for name, value, unit in part.run(trial):
                tell(part=part.name, figure=name, value=value, unit=unit)
        except Exception as problem:  # noqa: BLE001 - the next part may work
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}"[:300]
        gc.collect()
        if trial.device == "cuda":
            torch.cuda.empty_cache()
        tell(part=part.name, ended=True, error=error, seconds=time.monotonic() - begin)


@dataclass
class Outcome:
    """The outcome of a part."""

    result: str = "not begun"
    seconds: float = 0.0


class Call:
    """The processes of one call, and what they told."""

    def __init__(self, parts: list[Part], out: Path, words: list[str], seconds: float) -> None:
        self.parts, self.out, self.words = parts, out, words
        self.deadline = time.monotonic() + seconds
        self.outcomes = {part.name: Outcome() for part in parts}
        self.figures: list[dict[str, Any]] = []
        self.kind = ""
        self.predictions: dict[str, dict[str, float]] = {}
        for folder in (out, HERE.parent / ".gpu-packages"):
            with suppress(OSError):
                text = (folder / PREDICTIONS).read_text("utf-8")
                self.predictions = self.predictions or json.loads(text)

    def run(self) -> None:
        """Run all parts; a process runs as many of them as share its allocator."""
        left = list(self.parts)
        while left and time.monotonic() < self.deadline:
            same = [part for part in left if part.segments == left[0].segments]
            self._run_process(same[:1] if left[0].segments else same)
            left = [part for part in left if self.outcomes[part.name].result == "not begun"]

    def _run_process(self, parts: list[Part]) -> None:
        """Start a process; end it at the deadline of a part."""
        names = [word for part in parts for word in ("--part", part.name)]
        environment = dict(os.environ)
        if parts[0].segments:
            environment["PYTORCH_ALLOC_CONF"] = parts[0].segments
        command = [sys.executable, __file__, *self.words, *names]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=self._read, args=(process.stdout, lines), daemon=True)
        reader.start()
        current, limit = parts[0], time.monotonic() + START_S + parts[0].limit_s
        self.outcomes[current.name].result = "the process ended"
        try:
            while (line := self._next(lines, limit)) is not None:
                fact = json.loads(line)
                self.kind = fact.get("kind", self.kind)
                if "figure" in fact:
                    self._note(fact)
                elif "ended" in fact:
                    result = f"failed: {fact['error']}" if fact["error"] else "ok"
                    self.outcomes[fact["part"]] = Outcome(result, fact["seconds"])
                elif "part" in fact:
                    (current,) = [part for part in parts if part.name == fact["part"]]
                    limit = time.monotonic() + current.limit_s
                    self.outcomes[current.name].result = "the process ended"
                    print(f"== {current.name}, at most {current.limit_s} s", flush=True)
        except queue.Empty:
            self.outcomes[current.name] = Outcome("late: stopped", current.limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join()
            self.write()

    def _next(self, lines: queue.Queue[str | None], limit: float) -> str | None:
        """Return the next fact, None at the end of the process; `queue.Empty` at the limit."""
        return lines.get(timeout=max(0.01, min(limit, self.deadline) - time.monotonic()))

    def _read(self, output: Any, lines: queue.Queue[str | None]) -> None:
        with output, (self.out / "gpu.log").open("a", encoding="utf-8") as log:
            for line in output:
                log.write(line)
                if line.startswith("@"):
                    lines.put(line[1:])
        lines.put(None)

    def _note(self, fact: dict[str, Any]) -> None:
        """Add the prediction to a figure; print and store it."""
        predicted = self.predictions.get(self.kind, {}).get(f"{fact['part']}: {fact['figure']}")
        if predicted:
            fact |= {"predicted": predicted, "ratio": predicted / fact["value"]}
        self.figures.append(fact)
        with (self.out / "figures.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(fact) + "\n")
        print(row_of(fact), flush=True)

    def write(self) -> None:
        """Write the table of everything measured so far, and what was not measured."""
        lines = [
            f"| Part | Figure | Measured | Predicted ({self.kind}) | Predicted of measured |",
            "|---|---|--:|--:|--:|",
            *map(row_of, self.figures),
            "",
            *(f"- {name}: {o.result}, {o.seconds:.0f} s" for name, o in self.outcomes.items()),
        ]
        bad = [name for name, outcome in self.outcomes.items() if outcome.result != "ok"]
        lines += ["", f"Not measured in this call: {'; '.join((*bad, *NEVER_MEASURED))}."]
        (self.out / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def row_of(fact: dict[str, Any]) -> str:
    """Return a figure as a row of the table."""
    measured = f"{short(fact['value'])} {fact['unit']}".strip()
    predicted = f"{short(fact['predicted'])} {fact['unit']}" if "predicted" in fact else ""
    ratio = f"{fact['ratio']:.2f}" if "ratio" in fact else ""
    return f"| {fact['part']} | {fact['figure']} | {measured} | {predicted} | {ratio} |"


def short(value: Any) -> str:
    """Return a number with three digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main() -> None:
    """Run a call or predict its figures; the exit code is 1 if a part has no full result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("call", choices=(*CALLS, "predict"))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--seconds", type=float, help="limit of the whole call")
    parser.add_argument("--part", action="append", help="only this part, in this process")
    options = parser.parse_args()
    if options.call == "predict":
        text = json.dumps(predict(options.tiny), indent=1)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / PREDICTIONS).write_text(text, encoding="utf-8")
        return
    parts = [part for part in CALLS[options.call] if part.name in (options.part or [part.name])]
    if options.part:
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial("cpu" if options.tiny else "cuda", options.tiny, Path(folder))
            tell(kind=trial.kind)
            run_parts(parts, trial)
            return
    options.out.mkdir(parents=True, exist_ok=True)
    words = [options.call, "--out", str(options.out), *(["--tiny"] if options.tiny else [])]
    if options.tiny:  # a busy CPU may need longer
        parts = [replace(part, limit_s=10 * part.limit_s) for part in parts]
    call = Call(parts, options.out, words, options.seconds or LIMIT_S[options.call])
    call.run()
    print((options.out / "gpu.md").read_text("utf-8"))
    if options.tiny:
        print("No GPU was used: these are figures of a tiny model on a CPU.")
    raise SystemExit(any(outcome.result != "ok" for outcome in call.outcomes.values()))


if __name__ == "__main__":
    main()
