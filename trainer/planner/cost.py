"""Estimate the seconds of a role's calls on GPUs by arithmetic.

    model = ModelCost.of(role_model)
    seconds = pass_seconds(model, rows, dims, 16384, gpus, trains=True)

A pass takes two operations per token for every weight that multiplies it, and the operations of
attention. Gradients take twice as many, and recomputation adds another forward pass. FSDP gathers
weights during the computation. A step of decoding reads the weights that its tokens use, and the
keys and values of the unfinished rows. Nothing is measured on the planned GPUs: they are assumed to
reach fixed fractions of the rates in their data sheets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from trainer.config.devices import GIB_OF_GPUS
from verl_like.errors import ConfigError, nearest
from workers.memory import hf_config_of
from workers.models.memory_shapes import model_shapes
from workers.parallel.dims import ParallelDims
from workers.training.mfu import PEAKS, attention_width, expert_share
from workers.training.role_model import RoleModelSpec


@dataclass(frozen=True)
class Device:
    """A GPU, with its memory and its links. Rates are per second."""

    name: str
    memory_gib: float
    flops: float
    """Operations in dense bfloat16 products."""
    memory_bandwidth: float
    """Bytes from the GPU's memory."""
    link_bandwidth: float
    """Bytes to another GPU of its node, one way."""
    network_bandwidth: float
    """Bytes to a GPU of another node, one way."""

    @property
    def bytes(self) -> int:
        """Bytes of the GPU's memory."""
        return int(self.memory_gib * 2**30)


BANDWIDTHS = {
    "L4": (300e9, 32e9, 12.5e9),
    "L40S": (864e9, 32e9, 25e9),
    "A100": (2039e9, 300e9, 25e9),
    "H20": (4000e9, 450e9, 50e9),
    "H100": (3350e9, 450e9, 50e9),
    "H200": (4800e9, 450e9, 50e9),
    "B200": (8000e9, 900e9, 50e9),
    "MI300X": (5300e9, 448e9, 50e9),
}
"""Bytes per second of memory, of links in a node, and of a network with one port of 100 to 400
Gbit/s per GPU, as in nodes that are sold with eight of them.
"""
DEVICES = {
    name: Device(name, GIB_OF_GPUS[name], PEAKS[name], *rates) for name, rates in BANDWIDTHS.items()
}
NUMBERS = ("memory_gib", "flops", "memory_bandwidth", "link_bandwidth", "network_bandwidth")
"""The options `--<name>` of `verl-like plan` that describe a GPU."""


def data_sheet(name: str) -> Device | None:
    """Return the GPU of a driver's name ("NVIDIA H100 80GB HBM3"), if it is known."""
    words = re.split(r"[\s-]+", name)
    return next((DEVICES[word] for word in words if word in DEVICES), None)


def device_of(name: str, numbers: dict[str, Any]) -> Device:
    """Return the GPU with this name; the user's `numbers` replace the data sheet's."""
    device = {known.lower(): device for known, device in DEVICES.items()}.get(name.lower())
    if device is not None:
        return replace(device, **numbers)
    missing = [f"--{number}".replace("_", "-") for number in NUMBERS if number not in numbers]
    if missing:
        raise ConfigError(
            f"{name} (of --gpus or --device) is not a known GPU.{nearest(name, DEVICES)} Known: "
            f"{', '.join(DEVICES)}. For another GPU, set {', '.join(missing)} (GiB, operations "
            "per second, bytes per second of memory, of links in a node and between nodes)."
        )
    return Device(name, **numbers)


FLOPS_REACHED = 0.5
"""Fraction of the peak FLOPs that passes reach, from prime-rl's updates of Qwen3-4B on H100s."""
BYTES_REACHED = 0.7
"""Fraction of the peak bandwidth of memory and links that a call reaches."""
CALL_S = 0.2
"""Overhead of each call in seconds, in addition to its passes."""
DECODE_LAYER_S = 60e-6
"""Seconds per layer and decoding step in addition to memory traffic, with CUDA graphs (vLLM)."""
EAGER_LAYER_S = 550e-6
"""Seconds of a layer per decoding step if the host starts its kernels one by one, as the native
engine does: an H100 took 13.2 ms for the 24 layers of Qwen2.5-0.5B, with almost any batch size.
"""
ALL_REDUCE_S = 15e-6
"""Seconds of a small all-reduce in a node."""
PCIE = 32e9
"""Bytes per second between a GPU and its host, one way."""
BYTES = 2
"""Bytes of a number in bfloat16, which passes compute in."""
POINTS = 32
"""Number of lengths that represent the distribution of lengths."""


@dataclass(frozen=True)
class ModelCost:
    """Properties of a model that determine the time of its passes."""

    weights: float
    active: float
    """Number of weights that each token is multiplied with."""
    num_layers: int
    hidden_size: int
    attention_width: int
    """Query values per token, over all heads of all layers."""
    key_value_numbers: int
    in_experts: float = 0.0
    """Weights of routed experts."""
    expert_share: float = 1.0
    """Fraction of the routed experts that each token is sent to."""
    choices: int = 0
    """Number of experts per layer that each token is sent to."""

    @classmethod
    def of(cls, model: RoleModelSpec) -> ModelCost:
        """Read the properties from config.json."""
        shapes = model_shapes(model.model, model.head, torch.bfloat16)
        config: Any = hf_config_of(model.model).get_text_config()
        looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        share = expert_share(config)
        return cls(
            weights=shapes.num_weights,
            active=shapes.num_weights - looked_up - (1 - share) * shapes.num_in_experts,
            num_layers=shapes.num_layers,
            hidden_size=shapes.hidden_size,
            attention_width=attention_width(config),
            key_value_numbers=shapes.key_value_numbers,
            in_experts=shapes.num_in_experts,
            expert_share=share,
            choices=getattr(config, "num_experts_per_tok", None) or 0,
        )

    def read_by(self, num_tokens: float) -> float:
        """Return the number of weights that these tokens read; of experts, only those they use."""
        read: float = 1 - (1 - self.expert_share) ** num_tokens
        return self.active + (read - self.expert_share) * self.in_experts


@dataclass(frozen=True)
class StepRows:
    """The numbers of samples and prompts of a step, and their lengths in tokens."""

    samples: int
    prompts: int
    prompt: float
    responses: Sequence[float]
    """Lengths of responses that are equally likely, the longest last."""
    longest: int = 0
    """Tokens of the longest row that is possible."""
    mini_batches: int = 1
    epochs: int = 1
    waits: float = 0.0
    """Seconds per sample in which its environment works and nothing is generated."""

    @cached_property
    def mean_response(self) -> float:
        """Mean length of a response."""
        return sum(self.responses) / len(self.responses)

    @cached_property
    def tokens(self) -> float:
        """Mean length of a sample."""
        return self.prompt + self.mean_response

    @cached_property
    def pairs(self) -> float:
        """Mean number of token pairs per sample in which one attends to the other."""
        squares = sum((self.prompt + length) ** 2 for length in self.responses)
        return squares / len(self.responses) / 2


def spread(mean: float, most: float) -> tuple[float, ...]:
    """Return lengths with this mean; quantile u in [0, 1] is most * u^(most/mean - 1)."""
    power = most / mean - 1
    return tuple(most * ((i + 0.5) / POINTS) ** power for i in range(POINTS))


@dataclass(frozen=True)
class Gpus:
    """A number of equal GPUs, on nodes of `per_node` GPUs."""

    device: Device
    count: int
    per_node: int

    def rate(self, num_ranks: int, apart: int = 1) -> float:
        """Return bytes per second into each rank of a collective over ranks `apart` GPUs apart.

        Between nodes it uses the ports of all GPUs that take part, as NCCL's rings do.
        """
        rate = self.device.link_bandwidth
        if num_ranks * apart > self.per_node:
            rate = min(rate, max(1, self.per_node // apart) * self.device.network_bandwidth)
        return rate * BYTES_REACHED


def pass_seconds(
    model: ModelCost,
    rows: StepRows,
    dims: ParallelDims,
    tokens_per_pass: int,
    gpus: Gpus,
    *,
    trains: bool = False,
    recomputes: bool = False,
    offloads: bool = False,
    num_stages: int = 1,
) -> float:
    """Return the seconds of a call over all rows: a forward pass, or an update with its epochs.

    `num_stages` counts the stages on each rank of a pipeline.
    """
    times = rows.epochs if trains else 1
    attention = 2 * model.attention_width * rows.pairs
    forward = 2 * (model.active * rows.tokens + attention)
    operations = times * rows.samples * forward * (1 + trains * (2 + recomputes))
    compute = operations / (gpus.count * gpus.device.flops * FLOPS_REACHED)

    steps = rows.mini_batches * times if trains else 1
    on_rank = times * rows.samples * rows.tokens / dims.data_size / dims.sp
    num_passes = steps * math.ceil(on_rank / steps / tokens_per_pass)
    if dims.pp > 1:
        compute *= 1 + (dims.pp - 1) / (num_passes / steps) / num_stages

    directions = 1 + trains * (1 + recomputes)
    elsewhere = model.in_experts * (1 - 1 / dims.ep)  # tokens travel to these experts
    gathered = BYTES * (model.weights - elsewhere) / (dims.tp * dims.pp)
    shards = dims.shard * dims.sp
    exchanges = num_passes * directions + 2 * trains * steps  # weights, and gradients in float32
    exchange = exchanges * gathered * (1 - 1 / shards) / gpus.rate(shards, dims.tp)
    if dims.replicate > 1:  # gradients of the shards travel over other links
        rate = gpus.rate(dims.replicate, shards * dims.tp)
        exchange = max(exchange, trains * steps * 4 * gathered / shards / rate)

    states = BYTES * on_rank * directions * model.num_layers / dims.pp
    visible = 0.0
    if dims.tp > 1:
        visible += 4 * states * model.hidden_size * (1 - 1 / dims.tp) / gpus.rate(dims.tp)
    if dims.sp > 1:
        width = model.attention_width / model.num_layers
        visible += 4 * states * width / dims.sp / gpus.rate(dims.sp, dims.tp)
    if dims.ep > 1:  # a token goes to every expert of its choice and comes back
        sent = 2 * model.choices * states * model.hidden_size * (1 - 1 / dims.ep)
        visible += sent / gpus.rate(dims.ep)
    per_layer = 2 * ((dims.tp > 1) + (dims.sp > 1) + (dims.ep > 1))
    visible += per_layer * num_passes * directions * model.num_layers / dims.pp * ALL_REDUCE_S
    if trains:  # reads weight, gradient and two moments in float32, writes all but the gradient
        on_device = model.weights / (shards * dims.tp * dims.pp)
        visible += steps * 28 * on_device / (gpus.device.memory_bandwidth * BYTES_REACHED)
        visible += offloads * steps * 24 * on_device / (PCIE * BYTES_REACHED)
    return max(compute, exchange) + visible + CALL_S


def decode_seconds(
    model: ModelCost,
    rows: StepRows,
    gpus: Gpus,
    tp: int,
    cache_bytes: float,
    most_at_once: int,
    is_eager: bool = False,
) -> float | None:
    """Return the seconds of generation by engines of `tp` GPUs each.

    `is_eager` is True for engines that start kernels one by one. Return None if an engine's KV
    cache of `cache_bytes` cannot hold the longest row.
    """
    device, engines = gpus.device, gpus.count // tp
    samples = -(-rows.samples // engines)
    per_token = BYTES * model.key_value_numbers / tp
    slots = int(min(samples, most_at_once, cache_bytes / (per_token * rows.tokens)))
    if slots < 1 or cache_bytes < per_token * (rows.prompt + rows.responses[-1]):
        return None
    context = rows.prompt + rows.mean_response / 2
    flops = device.flops * FLOPS_REACHED

    def step(live: float) -> float:
        moved = BYTES * model.read_by(live) / tp + live * context * per_token
        busy = max(
            moved / (device.memory_bandwidth * BYTES_REACHED), 2 * model.active * live / tp / flops
        )
        if is_eager:
            return max(busy, model.num_layers * EAGER_LAYER_S)
        return busy + model.num_layers * (DECODE_LAYER_S + 2 * (tp > 1) * ALL_REDUCE_S)

    seconds = (samples - slots) * rows.mean_response / slots * step(slots)
    seconds += samples / slots * rows.waits
    start = 0.0
    for number, length in enumerate(rows.responses):  # the last rows end one by one
        seconds += (length - start) * step(slots * (1 - number / len(rows.responses)))
        start = length
    prompts = 2 * model.active * rows.prompts * rows.prompt / (gpus.count * flops)
    return seconds + prompts + CALL_S


def sync_seconds(model: ModelCost, gpus: Gpus, is_shared: bool) -> float:
    """Return the seconds of a weight sync to engines on these GPUs.

    On the trainer's GPUs, each GPU fetches the shards that it lacks. Other GPUs fetch all weights
    from another node.
    """
    missing = 1 - 1 / gpus.count if is_shared else 1.0
    rate = gpus.rate(gpus.count) if is_shared else gpus.rate(2, gpus.per_node)
    return BYTES * model.weights * missing / rate + CALL_S
