"""Predict the seconds of an H100 from the real program, without a GPU.

    python benchmarks/roofline.py                  # every measured figure next to its prediction
    python benchmarks/roofline.py --goals          # the MFU of 1.5B and 7B
    python benchmarks/roofline.py --record         # the figures that tests/test_roofline.py guards
    python benchmarks/roofline.py update 1.5b --compiled
    python benchmarks/roofline.py log_probs 7b
    python benchmarks/roofline.py decode 0.5b --rows 256
    python benchmarks/roofline.py host 0.5b         # the host's time to prepare a mini-batch

The real worker runs on the meta device (`recorder`). A call prints its seconds, and by place: its
operations, its waits for the device, and its copies to the device.
"""

from __future__ import annotations

import os

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # compiled functions run as they are written

import argparse
import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_models import CACHE_GIB, QWEN2, Job, actor_of, config_of, rows_of
from recorder import H100, Operation, Recorder, fused
from sides import HERE
from transformers import AutoModelForCausalLM

META = torch.device("meta")


class _Attention(torch.autograd.Function):
    """Attention whose operations are recorded and not computed."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, pairs: float, *states: Any) -> Any:
        query, key, value = states
        ctx.save_for_backward(query, key, value)
        ctx.recorder, ctx.pairs = recorder, pairs
        output = torch.empty_like(query)
        flops = 4 * pairs * query.shape[1] * query.shape[2]
        recorder.add("attention", states, [output], flops)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        states = ctx.saved_tensors
        query = states[0]
        grads = [torch.empty_like(part) for part in states]
        flops = 10 * ctx.pairs * query.shape[1] * query.shape[2]
        ctx.recorder.add("attention_backward", [*states, grad], grads, flops)
        return None, None, *grads


@contextmanager
def on_meta(recorder: Recorder) -> Iterator[None]:
    """Context in which models are built on the meta device, as they would be on a GPU."""
    from workers.training import attention, lm_head
    from workers.training.attention import VarlenKernel

    def attend(*states: Any, **_: Any) -> Any:
        query, key, value, bounds, key_bounds, *_longest = states
        pairs = sum(
            count * (keys - count) + count * (count + 1) / 2
            for count, keys in zip(bounds.lengths, key_bounds.lengths, strict=True)
        )
        return _Attention.apply(recorder, pairs, query, key, value)  # type: ignore[no-untyped-call]

    def with_lengths(lengths: Any, device: Any) -> Any:
        tensor: Any = bounds(lengths, device)
        tensor.lengths = list(lengths)
        return tensor

    kernel = VarlenKernel("flash attention", attend, torch.bfloat16, has_softcap=True)
    bounds, rows_per_chunk = attention._bounds, lm_head.rows_per_chunk
    stand_ins: dict[str, Callable[..., Any]] = {
        "torch.optim.optimizer._get_fused_kernels_supported_devices": lambda: ["meta"],
        "workers.training.build.find_kernel": lambda *_: (kernel, ""),
        "workers.training.build.load_weights": move_buffers,
        "workers.training.attention._bounds": with_lengths,
        "workers.training.parts.compile.all_reduce": lambda *_: False,
        "workers.training.lm_head.rows_per_chunk": lambda config, words=None, _="": rows_per_chunk(
            config, words, "cuda"
        ),
    }
    with patched(stand_ins):
        yield


@contextmanager
def patched(stand_ins: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Context in which these names are bound to stand-ins."""
    with ExitStack() as stack:
        for target, stand_in in stand_ins.items():
            stack.enter_context(patch(target, stand_in))
        yield


def move_buffers(module: Any, *_: Any) -> None:
    """Move the buffers of a module to the meta device, where its weights are."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(META)


def actor(folder: Path, job: Job) -> Any:
    """Return the actor of a job on the meta device; build and run it inside `on_meta`."""
    worker = actor_of(folder, job, "cpu")
    worker._device = META
    worker.init_model(100)
    return worker


def record(job: Job, call: str) -> Recorder:
    """Return what an update, or a pass for log-probs, does on the device."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder, on_meta(recorder):
        with Recorder():  # a short pass through compiled layers asks for numbers
            worker = actor(Path(folder), job)
        data = rows_of(job)
        with recorder:
            worker.update_actor(data) if call == "update" else worker.compute_log_prob(data)
    return recorder


def policy(size: str, layers: int = 0) -> Any:
    """Return a language model on the meta device, in bfloat16."""
    with META:
        config = config_of(size, layers)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    move_buffers(module)
    return module


def decoded_token(size: str, num_rows: int, prompt: int, layers: int = 0) -> Recorder:
    """Return what the native engine does for one more token of every row."""
    from workers.rollout.base import EngineLimits, SamplingParams
    from workers.rollout.native.engine import NativeRolloutEngine
    from workers.rollout.sample import Sample

    module = policy(size, layers)
    recorders = []
    checks: dict[str, Callable[..., Any]] = {
        "workers.rollout.native.engine.check_decoding": lambda *_: None,
        "workers.rollout.native.engine.agrees": lambda _: True,
    }
    with patched(checks):
        for num_tokens in (3, 4):
            recorders.append(Recorder())
            limits = EngineLimits(prompt, 512, max_num_seqs=num_rows, kv_cache_gib=CACHE_GIB)
            engine = NativeRolloutEngine(module, limits, owns_weights=False)
            engine.commit(0)
            samples = [Sample([6] * prompt, key) for key in range(num_rows)]
            with recorders[-1]:
                engine.generate(samples, SamplingParams(max_tokens=num_tokens, stop_token_ids=()))
    before, recorder = recorders
    del recorder.operations[: len(before.operations)]
    recorder.waits -= before.waits
    recorder.copies -= before.copies
    recorder.num_started -= before.num_started
    return recorder


def of_function(run: Callable[[], Any]) -> float:
    """Return the milliseconds of the device for a function over tensors on the meta device."""
    with Recorder() as recorder:
        run()
    return 1e3 * device_seconds(recorder.operations)


def device_seconds(operations: Iterable[Operation]) -> float:
    """Return the time of the device for these operations."""
    return sum(operation.seconds(H100) for operation in operations)


def sample(num_rows: int, **settings: Any) -> None:
    """Sample from rows of 152k words."""
    from workers.rollout.base import SamplingParams
    from workers.rollout.sampling import sample_tokens

    logits = torch.empty(num_rows, 151936, device=META)
    noise = torch.empty(num_rows, dtype=torch.float64, device=META)
    sample_tokens(logits, noise, SamplingParams(max_tokens=1, stop_token_ids=(), **settings))


def sampled(**settings: Any) -> float:
    """Return the milliseconds in which 256 rows of 152k words are sampled."""
    return of_function(lambda: sample(256, **settings))


def head_log_probs(compiled: bool, backward: bool) -> float:
    """Return the milliseconds of log-probs and entropies of 1,024 positions and 152k words."""
    from verl_like.tensor_ops import logprobs_and_entropy_from_logits

    logits = torch.empty(1024, 151936, device=META, dtype=torch.bfloat16).requires_grad_()
    labels = torch.empty(1024, dtype=torch.long, device=META)
    with Recorder() as recorder:
        numbers = logprobs_and_entropy_from_logits(
            logits, labels, fused=compiled, inplace_backward=True
        )
        if backward:
            numbers[0].sum().backward()
    return 1e3 * device_seconds(recorder.kernels(compiled))


def needed_flops(job: Job) -> float:
    """Return the operations of an update without recomputation."""
    from workers.training import mfu
    from workers.training.microbatch import MicroBatchBudget

    with tempfile.TemporaryDirectory() as folder, on_meta(Recorder()), Recorder():
        engine = actor(Path(folder), job).engine
    engine.cut(engine.take(rows_of(job)).columns, MicroBatchBudget(tokens=job.tokens))
    return mfu.needed_flops(engine, True)


def host_ms(job: Job) -> dict[str, float]:
    """Return the milliseconds in which this machine prepares a mini-batch, the best of five."""
    from workers.training.microbatch import MicroBatchBudget, mini_batch

    with tempfile.TemporaryDirectory() as folder, on_meta(Recorder()):
        with Recorder():
            worker = actor(Path(folder), job)
        engine, data, best = worker.engine, rows_of(job), dict[str, float]()
        columns, budget = worker.objective(data).loss.columns, MicroBatchBudget(tokens=job.tokens)

        def timed(name: str, run: Callable[[], Any]) -> Any:
            begin = time.thread_time()
            result = run()
            best[name] = min(best.get(name, math.inf), 1e3 * (time.thread_time() - begin))
            return result

        for _ in range(5):
            taken = timed("take", lambda: engine.take(data, columns))
            batch = timed("mini-batch", lambda rows=taken: mini_batch(rows, 0, 1, None))
            _, batches = timed("micro-batches", lambda of=batch: engine.prepare(of, budget))
            timed("first feed", lambda rows=batches[0][0]: engine.reading.feeds(rows))
    return best


def seconds_of(job: Job, call: str = "update") -> float:
    """Return the predicted seconds of a call."""
    return record(job, call).seconds(H100, job.compiled)


def update_us(size: str) -> float:
    """Return the microseconds per token of a compiled update, from two and four layers."""
    job = Job(size, rows=8, tokens=8192, compiled=True)
    two, four = (seconds_of(replace(job, layers=count)) for count in (2, 4))
    seconds = two + (four - two) / 2 * (QWEN2[size][2] - 2)
    return 1e6 * seconds / (job.rows * (job.prompt + job.response))


def head_in_slices() -> float:
    """Return the seconds of the compiled update of 1.5B, as it was measured: with an eager head."""
    kernels = fused(record(Job("1.5b"), "update").operations, "verl_like/tensor_ops")
    return device_seconds(kernels)


def optimizer_ms(name: str) -> float:
    """Return the milliseconds of the operations of this name in the optimizer's step."""
    operations = record(Job("1.5b", rows=1, tokens=1024), "update").operations
    return 1e3 * device_seconds(op for op in operations if op.name.startswith(name))


GROUPS = Job("1.5b", prompt=1024, response=512, same_prompts=8)
SMALL = Job("0.5b", rows=8, tokens=4096)
STEP = Job("0.5b", rows=256, prompt=384, response=510, same_prompts=4, compiled=True)


@dataclass(frozen=True)
class Figure:
    """A figure that an H100 measured (`benchmarks/README.md`), and its prediction."""

    name: str
    unit: str
    measured: float
    predict: Callable[[], float]
    why_off: str = ""

    def line(self) -> tuple[str, bool]:
        """Return a line of the table, and whether the prediction is off without a reason."""
        predicted = self.predict()
        ratio = predicted / self.measured
        is_off = abs(ratio - 1) > MOST_OFF
        numbers = f"{self.measured:6.2f} {predicted:6.2f} {self.unit:2s} {ratio:5.2f}"
        return f"{self.name:48s} {numbers} {self.why_off * is_off}", is_off and not self.why_off


MOST_OFF = 0.2
MEASURED = [
    Figure("update of 1.5B, 32,768 tokens, eager", "s", 1.35, lambda: seconds_of(Job("1.5b"))),
    Figure("the same, compiled, with an eager head", "s", 1.10, head_in_slices),
    Figure(
        "log-probs of 1.5B, 32,768 tokens",
        "s",
        0.38,
        lambda: seconds_of(Job("1.5b"), "log_probs"),
    ),
    Figure("AdamW step of 1.5B", "ms", 18, lambda: optimizer_ms("_fused_adamw")),
    Figure("gradient norm of 1.5B", "ms", 3, lambda: optimizer_ms("linalg_vector_norm")),
    Figure("update of 0.5B, 8 rows, eager", "s", 0.47, lambda: seconds_of(SMALL)),
    Figure(
        "4 prompts of 1.5B x 8 rows, each row alone",
        "s",
        1.87,
        lambda: seconds_of(replace(GROUPS, shares=False)),
    ),
    Figure(
        "the same, prefixes shared",
        "s",
        1.58,
        lambda: seconds_of(GROUPS),
        "measured when prefixes were copied, and the gradients of copies sorted",
    ),
    Figure(
        "update of a GRPO step of 0.5B, 64 x 4 rows",
        "s",
        3.6,
        lambda: seconds_of(STEP),
        "measured with an eager head, and rows of unlike lengths",
    ),
    Figure(
        "token of 0.5B, native engine, 64 rows",
        "ms",
        11.8,
        lambda: 1e3 * decoded_token("0.5b", 64, 128).seconds(H100),
    ),
    Figure(
        "token of 0.5B, native engine, 256 rows",
        "ms",
        13.2,
        lambda: 1e3 * decoded_token("0.5b", 256, 128).seconds(H100),
    ),
    Figure(
        "generation of that GRPO step",
        "s",
        11.3,
        lambda: 510 * decoded_token("0.5b", 256, 640).seconds(H100),
        "the step took 22 ms per token where decoding alone took 13: not explained",
    ),
    Figure(
        "sampling of 256 rows, plain",
        "ms",
        0.7,
        sampled,
        "measured in four parts of 64 rows, for which 0.74 ms are predicted",
    ),
    Figure(
        "sampling of 256 rows, top-k",
        "ms",
        3.0,
        lambda: sampled(top_k=50),
        "topk reads its input several times",
    ),
    Figure("sampling of 256 rows, min-p", "ms", 1.7, lambda: sampled(min_p=0.05)),
    Figure("sampling of 256 rows, top-p", "ms", 8.6, lambda: sampled(top_p=0.9)),
    Figure(
        "log-probs of 1,024 positions, eager",
        "ms",
        3.8,
        lambda: head_log_probs(False, False),
        "logsumexp reads its input twice",
    ),
    Figure("the same with gradients", "ms", 7.4, lambda: head_log_probs(False, True)),
    Figure(
        "log-probs of 1,024 positions, compiled", "ms", 0.6, lambda: head_log_probs(True, False)
    ),
    Figure(
        "the same with gradients",
        "ms",
        1.3,
        lambda: head_log_probs(True, True),
        "the compiled gradient does not reach the bandwidth",
    ),
]


def check() -> None:
    """Print every measured figure next to its prediction; exit with 1 if one is off unexplained."""
    unexplained = 0
    print(f"{'':48s} measured predicted, ratio")
    for figure in MEASURED:
        line, is_unexplained = figure.line()
        unexplained += is_unexplained
        print(line, flush=True)
    raise SystemExit(bool(unexplained))


def over_links(job: Job, num_gpus: int = 8) -> str:
    """Describe what FSDP2 on a node adds to the update, if it hides behind the computation."""
    from trainer.planner.cost import DEVICES, Gpus

    with META:
        module = AutoModelForCausalLM.from_config(config_of(job.size))
    num_weights = sum(weight.numel() for weight in module.parameters())
    passes = -(-job.rows * (job.prompt + job.response) // job.tokens)
    gathers = passes * (2 + job.recomputes)  # of bfloat16 weights
    num_bytes = num_weights * (2 * gathers + 4 * passes) * (1 - 1 / num_gpus)
    seconds = num_bytes / Gpus(DEVICES["H100"], num_gpus, num_gpus).rate(num_gpus)
    return f"FSDP2 over {num_gpus} GPUs: {seconds:.2f} s on the links, beside the products"


SIZES = ("0.5b", "1.5b", "7b")


def record_guard() -> None:
    """Write the figures that a test compares with."""
    token = decoded_token("0.5b", 256, 128, layers=2)
    figures = {
        "update, us per token": {
            size: round(update_us(size), 2) for size in ("0.5b", "1.5b", "7b")
        },
        "operations per token of two layers": token.num_started,
    }
    (HERE / "roofline.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def goals() -> None:
    """Print the seconds and the MFU of updates of 32,768 tokens."""
    for size, recomputes in product(("1.5b", "7b"), (True, False)):
        job = Job(size, compiled=True, recomputes=recomputes)
        seconds = seconds_of(job)
        mfu = needed_flops(job) / seconds / H100.peak
        how = "recomputed" if recomputes else "not recomputed"
        print(f"{size}, {how}: {seconds:.2f} s, MFU {mfu:.0%}; {over_links(job)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("call", choices=("update", "log_probs", "decode", "host"), nargs="?")
    parser.add_argument("size", choices=QWEN2, nargs="?")
    parser.add_argument("--goals", action="store_true")
    parser.add_argument("--record", action="store_true", help="write roofline.json")
    for name in ("rows", "prompt", "response", "tokens", "same_prompts", "layers"):
        default = getattr(Job, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--compiled", action="store_true")
    for name in ("recomputes", "shares"):
        parser.add_argument(f"--no-{name}", dest=name, action="store_false")
    options = vars(parser.parse_args())
    call, wants_goals, wants_record = (options.pop(name) for name in ("call", "goals", "record"))
    if wants_goals:
        return goals()
    if call is None and wants_record:
        return record_guard()
    if call is None:
        return check()
    job = Job(**options)
    if call == "host":
        return print(", ".join(f"{name} {ms:.1f} ms" for name, ms in host_ms(job).items()))
    if call == "decode":
        recorder = decoded_token(job.size, job.rows, job.prompt, job.layers)
    else:
        recorder = record(job, call)
    kinds: dict[str, float] = defaultdict(float)
    places: dict[tuple[str, str], float] = defaultdict(float)
    kernels = recorder.kernels(job.compiled)
    for kernel in kernels:
        kinds[kernel.kind] += kernel.seconds(H100)
        places[kernel.place, kernel.name] += kernel.seconds(H100)
    parts = ", ".join(f"{kind} {seconds:.4f}" for kind, seconds in kinds.items())
    print(f"{recorder.seconds(H100, job.compiled):.4f} s; device: {parts}; {len(kernels)} kernels")
    for (place, name), seconds in sorted(places.items(), key=lambda item: -item[1])[:25]:
        print(f"{1e3 * seconds:8.1f} ms {name:28s} {place}")
    for (name, place), count in recorder.waits.most_common():
        print(f"waits {count} times for {name}: {place}")
    for place, count in recorder.copies.most_common():
        print(f"copies to the device {count} times: {place}")


if __name__ == "__main__":
    main()
