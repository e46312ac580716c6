"""Predict the seconds of a role's calls on GPUs.

    model = ModelCost.of(role_model, rows, gpus)
    seconds = pass_seconds(model, rows, dims, 16384, gpus, trains=True)

Passes and optimizer steps of the role's own model class are recorded on the meta device
(`trainer.tools.planner.recorder`), with few layers and rows: seconds are a line through the
recorded ones. So are tokens of the native engine and the sampler. Bytes of FSDP's collectives are
those of the recorded program. A step of vLLM has no record: it reads the weights that its tokens
use, and the keys and values of the unfinished rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trainer.config.devices import GIB_OF_GPUS
from trainer.tools.planner.recorder import GpuSpeeds
from trainer.tools.planner.records import CallWork, Records, products_only, record_passes
from verl_like.errors import ConfigError, nearest
from workers.memory import hf_config_of
from workers.models.memory_shapes import model_shapes
from workers.models.pass_trace import NOT_TRACED
from workers.parallel.sharding import ParallelDims
from workers.training.mfu import PEAKS, attention_width, expert_share
from workers.training.role_model_spec import RoleModelSpec


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

    @property
    def rates(self) -> GpuSpeeds:
        """The rates that operations reach."""
        return GpuSpeeds.from_peak(self.flops, self.memory_bandwidth)


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


def measured_on(gpu: str) -> list[dict[str, Any]]:
    """Return the figures that were measured on this GPU; empty for a GPU that was not at hand."""
    text = Path(__file__).with_name("measured.json").read_text(encoding="utf-8")
    figures: list[dict[str, Any]] = json.loads(text).get(gpu, [])
    return figures


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


LINKS_REACHED = 0.7
"""Fraction of the peak bandwidth of links that a collective reaches; not measured."""
DECODE_LAYER_S = 60e-6
"""Seconds per layer and decoding step in addition to memory traffic, with CUDA graphs (vLLM)."""
CALL_S = 0.02
"""Seconds in which a call reaches its ranks and returns."""
PREPARE_S = 2e-7
"""Seconds in which the host prepares a token of a rank's rows (`benchmarks/roofline.py`)."""
ALL_REDUCE_S = 15e-6
"""Seconds of a small all-reduce in a node."""
PCIE = 32e9
"""Bytes per second between a GPU and its host, one way."""
BFLOAT16_BYTES = 2
"""Bytes of a number in bfloat16, which passes compute in."""
POINTS = 32
"""Number of lengths that represent the distribution of lengths."""


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


def assumed_lengths(mean: float, most: float) -> tuple[float, ...]:
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
        return rate * LINKS_REACHED


@dataclass(frozen=True)
class ModelCost:
    """Properties of a model, and records of its calls, that determine the time of its passes."""

    weights: float
    active: float
    """Number of weights that each token is multiplied with."""
    num_layers: int
    hidden_size: int
    attention_width: int
    """Query values per token, over all heads of all layers."""
    key_value_numbers: int
    passes: Records
    """Calls `forward`, `update` and `step` for rows of `length` tokens."""
    length: float
    num_ranks: int = 1
    """Ranks that share the weights in the recorded calls."""
    in_experts: float = 0.0
    """Weights of routed experts."""
    expert_share: float = 1.0
    """Fraction of the routed experts that each token is sent to."""
    choices: int = 0
    """Number of experts per layer that each token is sent to."""

    @classmethod
    def of(cls, model: RoleModelSpec, rows: StepRows, gpus: Gpus) -> ModelCost:
        """Read the properties from config.json, and record the calls.

        The recorded rows have equal lengths, with as many pairs of tokens per token as `rows`.
        """
        shapes = model_shapes(model.model, model.head, torch.bfloat16)
        config: Any = hf_config_of(model.model).get_text_config()
        looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        share = expert_share(config)
        num_ranks = 8 if gpus.count > 1 and model.strategy not in ("ddp", "single") else 1
        length = 2 * rows.pairs / rows.tokens
        response = max(1, round(length * rows.mean_response / rows.tokens))
        prompt = max(1, round(length) - response)
        gpu, num_layers = gpus.device.rates, shapes.num_layers
        weights = shapes.num_weights
        active = weights - looked_up - (1 - share) * shapes.num_in_experts
        try:
            passes = record_passes(model, prompt, response, gpu, num_ranks)
        except NOT_TRACED:
            length = prompt + response
            passes = products_only(weights, active, length, num_layers, gpu, num_ranks)
        return cls(
            weights=weights,
            active=active,
            num_layers=num_layers,
            hidden_size=shapes.hidden_size,
            attention_width=attention_width(config),
            key_value_numbers=shapes.key_value_numbers,
            passes=passes,
            length=prompt + response,
            num_ranks=num_ranks,
            in_experts=shapes.num_in_experts,
            expert_share=share,
            choices=getattr(config, "num_experts_per_tok", None) or 0,
        )

    def read_by(self, num_tokens: float) -> float:
        """Return the number of weights that these tokens read; of experts, only those they use."""
        read: float = 1 - (1 - self.expert_share) ** num_tokens
        return self.active + (read - self.expert_share) * self.in_experts


def pass_seconds(
    model: ModelCost,
    rows: StepRows,
    dims: ParallelDims,
    tokens_per_pass: int,
    gpus: Gpus,
    *,
    trains: bool = False,
    recomputed: float = 0,
    offloads: bool = False,
    num_stages: int = 1,
) -> float:
    """Return the seconds of a call over all rows: a forward pass, or an update with its epochs.

    `recomputed` counts layers, and `num_stages` the stages on each rank of a pipeline.
    """
    times = rows.epochs if trains else 1
    steps = rows.mini_batches * times if trains else 1
    on_rank = times * rows.samples * rows.tokens / dims.data_size / dims.sp
    num_passes = steps * math.ceil(on_rank / steps / tokens_per_pass)
    rows_of_pass = on_rank / num_passes / model.length

    def work(call: str, num_layers: float) -> CallWork:
        return model.passes.at(call, num_layers, rows_of_pass)

    call = "update" if trains else "forward"
    one_pass, outside = work(call, model.num_layers), work(call, 0)
    recomputed = min(recomputed, model.num_layers) if trains else 0
    again, never = work("forward", recomputed), work("forward", 0)
    bubble = (dims.pp - 1) / (num_passes / steps) / num_stages
    device = one_pass.device + again.device - never.device
    compute = num_passes * device / (dims.tp * dims.pp) * (1 + bubble)
    host = num_passes * (one_pass.host + again.host - never.host) / dims.pp

    # the weights outside of layers stay gathered from pass to pass
    elsewhere = model.in_experts * (1 - 1 / dims.ep)  # tokens travel to these experts
    here = (1 - elsewhere / model.weights) / (dims.tp * dims.pp)
    shards = dims.shard * dims.sp
    gathered = num_passes * (one_pass.gathered - outside.gathered) + steps * outside.gathered
    moved = here * (gathered + num_passes * one_pass.reduced) * (1 - 1 / shards)
    exchange = moved / gpus.rate(shards, dims.tp)
    if dims.replicate > 1 and trains:  # float32 gradients of the shards travel over other links
        sums = num_passes if shards > 1 else steps
        moved = sums * 8 * here * model.weights / shards * (1 - 1 / dims.replicate)
        exchange = max(exchange, moved / gpus.rate(dims.replicate, shards * dims.tp))

    states = BFLOAT16_BYTES * on_rank * (1 + 2 * trains) * model.num_layers / dims.pp
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
    directions = 1 + 2 * trains
    visible += per_layer * num_passes * directions * model.num_layers / dims.pp * ALL_REDUCE_S
    if trains:
        sharded = shards * dims.tp * dims.pp
        step = model.passes.at("step", model.num_layers)
        visible += steps * step.device * model.num_ranks / sharded
        visible += offloads * steps * 24 * model.weights / sharded / PCIE
    return max(compute, host, exchange) + visible + PREPARE_S * on_rank + CALL_S


def decode_seconds(
    model: ModelCost,
    rows: StepRows,
    gpus: Gpus,
    tp: int,
    cache_bytes: float,
    most_at_once: int,
    sampler: float = 0.0,
    tokens: Records | None = None,
) -> float | None:
    """Return the seconds of generation by engines of `tp` GPUs each.

    `sampler` are the seconds in which a row's token is sampled. `tokens` are records of the native
    engine; without them the engine is vLLM, whose steps are calculated from bytes. Return None if
    an engine's KV cache of `cache_bytes` cannot hold the longest row.
    """
    device, engines = gpus.device, gpus.count // tp
    samples = -(-rows.samples // engines)
    per_token = BFLOAT16_BYTES * model.key_value_numbers / tp
    slots = int(min(samples, most_at_once, cache_bytes / (per_token * rows.tokens)))
    if slots < 1 or cache_bytes < per_token * (rows.prompt + rows.responses[-1]):
        return None
    context = rows.prompt + rows.mean_response / 2
    rates = device.rates

    def step(live: float) -> float:
        if tokens is not None:
            token = tokens.at("token", model.num_layers, live)
            return max(token.device, token.host)
        moved = BFLOAT16_BYTES * model.read_by(live) / tp + live * context * per_token
        busy = max(moved / rates.memory, 2 * model.active * live / tp / rates.products)
        per_layer = DECODE_LAYER_S + 2 * (tp > 1) * ALL_REDUCE_S
        return busy + live * sampler + model.num_layers * per_layer

    seconds = (samples - slots) * rows.mean_response / slots * step(slots)
    seconds += samples / slots * rows.waits
    start = 0.0
    for number, length in enumerate(rows.responses):  # the last rows end one by one
        seconds += (length - start) * step(slots * (1 - number / len(rows.responses)))
        start = length
    prompts = rows.prompts * rows.prompt / gpus.count / model.length
    read = model.passes.at("forward", model.num_layers, prompts)
    return seconds + read.device + CALL_S


def sync_seconds(model: ModelCost, gpus: Gpus, is_shared: bool) -> float:
    """Return the seconds of a weight sync to engines on these GPUs.

    On the trainer's GPUs, each GPU fetches the shards that it lacks. Other GPUs fetch all weights
    from another node.
    """
    missing = 1 - 1 / gpus.count if is_shared else 1.0
    rate = gpus.rate(gpus.count) if is_shared else gpus.rate(2, gpus.per_node)
    return BFLOAT16_BYTES * model.weights * missing / rate + CALL_S
