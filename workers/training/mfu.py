"""Model FLOPs utilization (MFU) of an engine, verl's `perf/mfu/…`, and the memory in use.

    with utilization("actor", engine) as mfu:
        metrics = update(engine, data, ...)
    metrics |= mfu                              # {"perf/mfu/actor": 0.41}, or nothing

It counts the floating-point operations that the rows need, however they are computed: per token,
two for every weight that multiplies it, and its attention to the whole row. Each gradient needs the
same again. A prefix that rows of a mini-batch share counts once. Repeated work (gradient
checkpointing) and useless work (padding, dummy passes) do not count. A loss needs the head only at
responses, so only these positions count. The engine counts when it divides rows into passes
(`PassCounts`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl_like.process.machine import memory_gib
from workers.models.attention import heads_of, layer_configs
from workers.models.causal_lm import language_half
from workers.training.microbatch import all_reduce
from workers.training.passes.packing import PassCounts

if TYPE_CHECKING:
    from workers.training.engine import TrainEngine


PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H800": 989e12,
    "H800 PCIe": 756e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L20": 119.5e12,
    "L4": 121e12,
    "MI300X": 1307e12,
}
"""Words in a GPU's name -> dense bfloat16 operations per second, from its data sheet."""


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak, by the longest matching name; nan if unknown, None on a CPU."""
    if device.type != "cuda":
        return None
    name = " ".join(re.split(r"[\s-]+", torch.cuda.get_device_name(device)))
    known = [words for words in PEAKS if f" {words} " in f" {name} "]
    return PEAKS[max(known, key=len)] if known else nan


@contextmanager
def utilization(
    name: str, engine: TrainEngine, *, trains: bool = True
) -> Iterator[dict[str, float]]:
    """Context in which the engine runs passes; yields a dict for the metric.

    `perf/mfu/<name>`, the ratio over all ranks, is set at the end. The dict stays empty if the peak
    of the device is unknown, as on a CPU.
    """
    metrics: dict[str, float] = {}
    engine.work = PassCounts()
    began = time.perf_counter()
    yield metrics
    peak = peak_flops(engine.device)
    if peak is None:
        return

    seconds = time.perf_counter() - began
    # the ranks of a model group have the same rows and divide the work
    shared = engine.dims.model_size
    here = [needed_flops(engine, trains) / shared, peak * seconds]
    sums = torch.tensor(here, dtype=torch.float64, device=engine.device)
    done, possible = all_reduce(sums, engine.groups.world).tolist()
    if isfinite(possible):
        metrics[f"perf/mfu/{name}"] = done / possible


def needed_flops(engine: TrainEngine, trains: bool) -> float:
    """Return the operations of the engine's work on this rank, with gradients if it `trains`."""
    work, model = engine.work, engine.whole_module
    body, head = language_half(model), model.get_output_embeddings()
    config = body.config.get_text_config()
    is_looked_up = {id(m.weight) for m in body.modules() if isinstance(m, nn.Embedding)}
    per_token = 0.0
    for name, weight in body.named_parameters():
        if weight.dim() > 1 and id(weight) not in is_looked_up:
            share = expert_share(config) if ".experts." in name else 1.0
            per_token += _factor(weight, trains) * weight.numel() * share
    per_read = _factor(head.weight, trains) * head.weight.numel()
    per_pair = (12 if trains else 4) * attention_width(config)
    return float(per_token * work.tokens + per_read * work.reads + per_pair * work.pairs)


def _factor(weight: nn.Parameter, trains: bool) -> int:
    """Operations per weight and token: 2 for the output, 2 for each gradient (input and weight)."""
    return 2 + (2 + 2 * weight.requires_grad if trains else 0)


def expert_share(config: Any) -> float:
    """Fraction of the experts that a token is sent to."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if count := getattr(config, key, None):
            return float(config.num_experts_per_tok / count)
    return 1.0


def attention_width(config: Any) -> int:
    """Number of query values per token, over all heads of all layers."""
    heads = [heads_of(layer) for layer in layer_configs(config)]
    return sum(count * size for count, _, size in heads)


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return memory in GiB under verl's names, of this process's GPU and of the whole machine.

    For a GPU, these are the peaks since the process started: memory of tensors, and memory reserved
    by the allocator. For the machine, it is the memory in use now (Linux only).
    """
    metrics = {}
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        metrics["perf/max_memory_allocated_gb"] = allocated / 2**30
        metrics["perf/max_memory_reserved_gb"] = reserved / 2**30

    total, available = memory_gib("MemTotal:"), memory_gib("MemAvailable:")
    if total is not None and available is not None:
        metrics["perf/cpu_memory_used_gb"] = total - available
    return metrics
