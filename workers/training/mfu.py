"""How much of its device's arithmetic an engine uses (MFU): verl's `perf/mfu/…`.

    with utilization("actor", engine, data, passes=epochs) as mfu:
        metrics = update(engine, data, ...)
    metrics |= mfu                              # {"perf/mfu/actor": 0.41}, or nothing

The floating-point operations are those that the rows need, however they are computed: two a token
for every weight that multiplies it, and the attention of every token to all of its row; as much
again for each gradient. Work that is done over (gradient checkpointing) or for nothing (padding,
dummy passes) does not count. A loss reads the head at responses only, so only there it counts.
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

from workers.models.causal_lm import body_of
from workers.training.microbatch import Rows, all_reduce
from workers.training.packing import by_segment, needed_lengths

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto
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
"""Words of a GPU's name -> operations a second in dense bfloat16 products, by its data sheet."""


def peak_flops(device: torch.device) -> float | None:
    """The device's peak, by the longest name of `PEAKS` that fits; nan if none, None on a CPU."""
    if device.type != "cuda":
        return None
    name = " ".join(re.split(r"[\s-]+", torch.cuda.get_device_name(device)))
    known = [words for words in PEAKS if f" {words} " in f" {name} "]
    return PEAKS[max(known, key=len)] if known else nan


@contextmanager
def utilization(
    name: str, engine: TrainEngine, data: DataProto, *, passes: int = 1, trains: bool = True
) -> Iterator[dict[str, float]]:
    """Within, the engine goes over these rows `passes` times; then the dict has `perf/mfu/<name>`.

    The ratio is over all ranks. The dict stays empty where a device's peak is not known: nobody has
    promised one of a CPU.
    """
    found: dict[str, float] = {}
    began = time.perf_counter()
    yield found
    peak = peak_flops(engine.device)
    if peak is None:
        return

    seconds = time.perf_counter() - began
    shared = engine.dims.model_size  # ranks of a model group hold the same rows, and share the work
    own = [passes * needed_flops(engine, data, trains) / shared, peak * seconds]
    sums = torch.tensor(own, dtype=torch.float64, device=engine.device)
    done, possible = all_reduce(sums, engine.groups.world).tolist()
    if isfinite(possible):
        found[f"perf/mfu/{name}"] = done / possible


def needed_flops(engine: TrainEngine, data: DataProto, trains: bool) -> float:
    """Operations of one pass over this rank's real rows, with the gradients where it `trains`."""
    names = ("input_ids", "attention_mask", "position_ids", "response_mask")
    taken = Rows.take(data, names, engine.dims.data_size).columns
    reads = engine.reading.reads(taken)
    lengths = needed_lengths(by_segment(taken, reads)).double()

    whole = engine.whole_module
    body, head = body_of(whole), whole.get_output_embeddings()
    config = body.config.get_text_config()
    is_looked_up = {id(own.weight) for own in body.modules() if isinstance(own, nn.Embedding)}
    per_token = 0.0
    for name, weight in body.named_parameters():
        if weight.dim() > 1 and id(weight) not in is_looked_up:
            per_token += _factor(weight, trains) * weight.numel() * _share(name, config)
    per_read = _factor(head.weight, trains) * head.weight.numel()
    per_pair = (12 if trains else 4) * config.num_hidden_layers * attention_width(config)

    pairs = lengths.square().sum()
    return float(per_token * lengths.sum() + per_read * reads.values.sum() + per_pair * pairs)


def _factor(weight: nn.Parameter, trains: bool) -> int:
    """Operations for each number of a weight and token: forward, gradient of input, of weight."""
    return 2 + (2 + 2 * weight.requires_grad if trains else 0)


def _share(name: str, config: Any) -> float:
    """The part of a weight that a token meets: of experts those it is sent to."""
    return expert_share(config) if ".experts." in name else 1.0


def expert_share(config: Any) -> float:
    """The part of the experts that a token is sent to."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if count := getattr(config, key, None):
            return float(config.num_experts_per_tok / count)
    return 1.0


def attention_width(config: Any) -> int:
    """Numbers of a token's queries in a layer, of all heads."""
    heads: int = config.num_attention_heads
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * size
