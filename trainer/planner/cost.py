"""Seconds of a role's calls on so many cards: arithmetic, bytes, and what of both is not hidden.

    model = Model.of(held)
    seconds = pass_seconds(model, rows, dims, 16384, device, trains=True)

A pass needs two operations a token for every weight that multiplies it, and those of attention;
gradients need twice as many, and recomputation the forward pass once more. Decoding reads all
weights and the live rows' keys and values at every step. A device's `rates` say what share of its
numbers is reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from trainer.planner.devices import Device
from workers.memory import HeldModel, hf_config_of
from workers.models.memory_shapes import ModelShapes, model_shapes
from workers.parallel.dims import ParallelDims
from workers.training.mfu import attention_width, expert_share

BYTES = 2
"""Of a number in bfloat16, which passes compute in."""


@dataclass(frozen=True)
class Model:
    """What the time of a pass depends on."""

    weights: float
    active: float
    """Of the weights, those that multiply a token."""
    num_layers: int
    hidden_size: int
    attention_width: int
    key_value_numbers: int
    in_experts: float = 0.0
    """Of the weights, those of routed experts,"""
    expert_share: float = 1.0
    """of which a token meets this share,"""
    choices: int = 0
    """and so many in a layer."""

    def read(self, num_tokens: float) -> float:
        """Weights that so many tokens meet: of experts those that any of them is sent to."""
        met: float = 1 - (1 - self.expert_share) ** num_tokens
        return self.active + (met - self.expert_share) * self.in_experts

    @classmethod
    def of(cls, held: HeldModel) -> Model:
        """By config.json alone."""
        shapes: ModelShapes = model_shapes(held.model, held.head, torch.bfloat16)
        config: Any = hf_config_of(held.model).get_text_config()
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


@dataclass(frozen=True)
class Rows:
    """Samples of a step by their lengths."""

    samples: int
    prompts: int
    prompt: float
    responses: Sequence[float]
    """Tokens of responses that are equally likely, the longest last."""
    mini_batches: int = 1
    epochs: int = 1
    waits: float = 0.0
    """Seconds of a sample in which it is not generated, since its environment works."""

    @cached_property
    def mean_response(self) -> float:
        """Tokens."""
        return sum(self.responses) / len(self.responses)

    @cached_property
    def tokens(self) -> float:
        """Of a sample."""
        return self.prompt + self.mean_response

    @cached_property
    def pairs(self) -> float:
        """Pairs of tokens of a sample of which one looks at the other."""
        return sum((self.prompt + each) ** 2 for each in self.responses) / len(self.responses) / 2


def spread(mean: float, most: float) -> tuple[float, ...]:
    """Lengths of this mean: one of rank u in [0, 1] has most * u^(most/mean - 1) tokens."""
    power = most / mean - 1
    return tuple(most * ((i + 0.5) / POINTS) ** power for i in range(POINTS))


POINTS = 32
"""Lengths that stand for all."""


@dataclass(frozen=True)
class Cards:
    """So many of a kind, in machines of `per_node`."""

    device: Device
    num: int
    per_node: int

    def rate(self, num_ranks: int, apart: int = 1) -> float:
        """Bytes a second into each of so many ranks, `apart` in number, of a collective.

        Between machines it goes over the ports of all cards that take part, as NCCL's rings do.
        """
        own = self.device.link
        if num_ranks * apart > self.per_node:
            own = min(own, max(1, self.per_node // apart) * self.device.network)
        return own * self.device.rates.link


def pass_seconds(
    model: Model,
    rows: Rows,
    dims: ParallelDims,
    tokens_per_pass: int,
    cards: Cards,
    *,
    trains: bool = False,
    recomputes: bool = False,
    offloads: bool = False,
    num_stages: int = 1,
) -> float:
    """A call over all rows: a forward pass, or an update by mini-batches, `epochs` times.

    `num_stages` are those of each rank of pp.
    """
    times = rows.epochs if trains else 1
    forward = 2 * (
        model.active * rows.tokens + 2 * model.num_layers * model.attention_width * rows.pairs
    )
    operations = times * rows.samples * forward * (1 + trains * (2 + recomputes))
    compute = operations / (cards.num * cards.device.flops_reached(trains))

    steps = rows.mini_batches * times if trains else 1
    on_rank = times * rows.samples * rows.tokens / dims.data_size / dims.sp
    num_passes = steps * math.ceil(on_rank / steps / tokens_per_pass)
    if dims.pp > 1:
        compute *= 1 + (dims.pp - 1) / (num_passes / steps) / num_stages

    directions = 1 + trains * (1 + recomputes)
    compute += num_passes * directions * model.num_layers / dims.pp * cards.device.rates.layer
    away = model.in_experts * (1 - 1 / dims.ep)  # on ranks that tokens travel to
    own = BYTES * (model.weights - away) / (dims.tp * dims.pp)
    shards = dims.shard * dims.sp
    gathered = num_passes * directions * own * (1 - 1 / shards)
    summed = trains * steps * 2 * own * (1 - 1 / shards)
    exchange = (gathered + summed) / cards.rate(shards, dims.tp)
    if shards > 1:
        collectives = (num_passes * directions + trains * steps) * model.num_layers / dims.pp
        exchange += collectives * cards.device.rates.collective
    if dims.replicate > 1:
        rate = cards.rate(dims.replicate, shards * dims.tp)
        exchange = max(exchange, trains * steps * 2 * 2 * own / shards / rate)  # over other links

    states = BYTES * on_rank * model.num_layers / dims.pp
    visible = 0.0
    if dims.tp > 1:
        visible += (
            4 * states * model.hidden_size * directions * (1 - 1 / dims.tp) / cards.rate(dims.tp)
        )
    if dims.sp > 1:
        visible += (
            4 * states * model.attention_width * directions / dims.sp / cards.rate(dims.sp, dims.tp)
        )
    if dims.ep > 1:  # every choice of a token goes to its expert and comes back
        sent = 2 * model.choices * states * model.hidden_size * (1 - 1 / dims.ep)
        visible += sent * directions / cards.rate(dims.ep)
    shared = (dims.tp > 1) + (dims.sp > 1) + (dims.ep > 1)  # each with two exchanges in a layer
    if shared:
        exchanges = 2 * shared * num_passes * directions * model.num_layers / dims.pp
        visible += exchanges * max(cards.device.rates.collective, cards.device.rates.all_reduce)
    if trains:  # reads weight, gradient and two moments in float32, writes all but the gradient
        on_device = model.weights / (shards * dims.tp * dims.pp)
        visible += steps * 28 * on_device / (cards.device.memory_reached)
        visible += offloads * steps * 24 * on_device / (PCIE * cards.device.rates.link)
    if cards.device.rates.hides:
        compute, exchange = max(compute, exchange), 0.0
    return compute + exchange + visible + cards.device.rates.call


PCIE = 32e9
"""Bytes a second between a card and its host, one way."""


def decode_seconds(
    model: Model, rows: Rows, cards: Cards, tp: int, cache_bytes: float, most_at_once: int
) -> float | None:
    """All responses by engines of `tp` cards each; None where no row's keys and values fit."""
    device, engines = cards.device, cards.num // tp
    samples = -(-rows.samples // engines)
    per_token = BYTES * model.key_value_numbers / tp
    slots = int(min(samples, most_at_once, cache_bytes / (per_token * rows.tokens)))
    if slots < 1 or cache_bytes < per_token * (rows.prompt + rows.responses[-1]):
        return None

    def step(live: float) -> float:
        context = rows.prompt + rows.mean_response / 2
        read = BYTES * model.read(live) / tp + live * context * per_token
        operations = 2 * model.active * live / tp
        reduce = 2 * model.num_layers * device.rates.all_reduce if tp > 1 else 0.0
        moved = read / (device.memory_reached)
        computed = operations / (device.flops_reached(trains=False))
        started = model.num_layers * device.rates.decode_layer + live * device.rates.decode_row
        return max(moved, computed) + started + reduce

    seconds = (samples - slots) * rows.mean_response / slots * step(slots)
    seconds += samples / slots * rows.waits
    begun = 0.0
    for number, length in enumerate(rows.responses):  # the last rows end one after the other
        seconds += (length - begun) * step(slots * (1 - number / len(rows.responses)))
        begun = length
    prompts = 2 * model.active * rows.prompts * rows.prompt
    return (
        seconds
        + prompts / (cards.num * device.flops_reached(trains=False))
        + cards.device.rates.call
    )


def sync_seconds(model: Model, cards: Cards, is_shared: bool) -> float:
    """New weights for the engines: those that a card lacks of the shards on its pool's cards, or
    all of them from another machine.
    """
    lacks = 1 - 1 / cards.num if is_shared else 1.0
    rate = cards.rate(cards.num) if is_shared else cards.rate(2, cards.per_node)
    return BYTES * model.weights * lacks / rate + cards.device.rates.call
