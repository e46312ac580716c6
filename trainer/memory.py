"""Memory of roles on their devices, from shapes: a table for the plan, and held against the device.

Roles of one pool share its devices. What they keep is added up; of what a call takes on top (whole
layers, activations, logits) the largest counts, since they take turns. A recipe says which roles it
has and how many tokens a pass of theirs is of (`trainer.ppo.memory`, `trainer.rows.memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.config.schema import TrainerConfig
from verl_like.errors import ConfigError
from verl_like.terminal import draw_table
from workers.config import ModelConfig
from workers.models.causal_lm import Head
from workers.models.folder import model_folder
from workers.models.hf_config import read_hf_config
from workers.models.memory_shapes import ModelShapes, model_shapes
from workers.models.precision import name_of, precision_of
from workers.parallel.sharding import Sharding
from workers.training.file_copies import LEAST_BYTES
from workers.training.lm_head import positions_at_once

GIB = 2**30


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on one device; `host` are those that it keeps in the machine's memory.

    So are `copies`, beside all others: what a checkpoint is written from.
    """

    role: str
    pool: str
    types: str
    weights: float = 0
    gradients: float = 0
    moments: float = 0
    whole: float = 0
    activations: float | None = 0
    kv_cache: float = 0
    host: float = 0
    copies: float = 0

    @property
    def kept(self) -> float:
        """What stays on the device between calls."""
        return self.weights + self.moments + self.kv_cache - self.host

    @property
    def call(self) -> float:
        """What a call takes on top of it, offloaded parts included."""
        return self.gradients + self.whole + (self.activations or 0) + self.host


@dataclass(frozen=True)
class LargestPass:
    """Tokens of a role's largest pass, all rows of full length, and those that get a head."""

    tokens: int
    reads: int


def engine_memory(
    role: str,
    pool: str,
    ranks: int,
    model: ModelConfig,
    head: Head,
    sharding: Sharding,
    device_type: str,
    largest: LargestPass,
    *,
    trains: bool,
    averages: float = 0,
    quantization: str | None = None,
    copied: Sequence[str] = (),
) -> RoleMemory:
    """A training engine; a frozen one keeps its weights in the type that it computes in.

    Or in int8, and then whole on every rank. `averages` are the bytes of moving averages beside the
    weights, of the whole model. `copied` are the contents of a checkpoint that are copied.
    """
    precision = precision_of(model, device_type)
    compute = precision.compute
    kept = precision.weights if trains else compute
    shapes = model_shapes(model, head, compute)
    shards = 1
    if ranks > 1 and not quantization and sharding.strategy not in ("ddp", "single"):
        shards = ranks if sharding.fsdp_size == -1 else sharding.fsdp_size

    weights = shapes.held(kept, quantization) / shards
    trained = shapes.num_trained * kept.itemsize / shards if trains else 0
    moments = 2 * trained
    weights += averages / shards
    offloads = device_type == "cuda"
    host = offloads * (sharding.param_offload * weights + sharding.optimizer_offload * moments)
    names = [quantization or name_of(kept), name_of(compute)]
    saved = {"optimizer": moments * shards}
    saved["model"] = averages + (trained * shards if trains else shapes.held(kept))
    copies = sum(saved.get(name, 0) for name in copied) / (shards if shards > 1 else ranks)
    if "hf_model" in copied:  # the first rank's, in the type of the model's folder
        stored = getattr(hf_config_of(model), "dtype", None) or compute
        copies += shapes.num_weights * stored.itemsize
    return RoleMemory(
        role=role,
        pool=pool,
        types=" / ".join(dict.fromkeys(names)),
        weights=weights,
        gradients=trained,
        moments=moments,
        whole=_whole(shapes, shards, kept != compute, trains, sharding.strategy),
        activations=_activations(model, head, shapes, largest, trains),
        host=host,
        copies=copies if copies >= LEAST_BYTES else 0,
    )


def copied_contents(trainer: TrainerConfig, contents: Sequence[str]) -> Sequence[str]:
    """Those of a checkpoint that are copied, and written while the run goes on."""
    writes = trainer.save_freq > 0 or trainer.save_every_minutes is not None
    return contents if writes and trainer.async_save else ()


def _activations(
    model: ModelConfig, head: Head, shapes: ModelShapes, largest: LargestPass, trains: bool
) -> float | None:
    """Bytes of a pass beside the weights; None where the model cannot be traced."""
    at_once, chunked = largest.reads, 0
    if head == "token":
        at_once = positions_at_once(hf_config_of(model), largest.reads, model.use_fused_kernels)
        if at_once < largest.reads:
            chunked = shapes.beside_chunks(largest.reads, trains)
    kept: float | None = shapes.logits(at_once)
    if trains:
        kept = shapes.saved(largest.tokens, at_once, model.enable_gradient_checkpointing)
    return None if kept is None else kept + chunked


def hf_config_of(model: ModelConfig) -> Any:
    """The configuration of transformers in the model's folder."""
    return read_hf_config(model_folder(model.path, weights=False))


def _whole(
    shapes: ModelShapes, shards: int, casts: bool, trains: bool, strategy: str = "fsdp"
) -> float:
    """Weights that a pass holds beside its shards: gathered ones, or a copy in the compute type.

    FSDP holds what is outside the layers, and two layers of which one is on its way (all of them
    under shard_grad_op); with a gradient of each in a backward pass, but for layers that wait.
    """
    if shards > 1:
        layer = (shapes.num_weights - shapes.num_outside_layers) / shapes.num_layers
        in_use = shapes.num_outside_layers + 2 * layer
        gathered = shapes.num_weights if strategy == "shard_grad_op" else in_use
        return (gathered + trains * in_use) * shapes.compute_bytes
    return shapes.num_weights * shapes.compute_bytes if casts else 0


def pool_bytes(roles: Sequence[RoleMemory]) -> dict[str, float]:
    """Bytes on a device of each pool: what its roles keep, and the largest call."""
    pools: dict[str, float] = {}
    for pool in dict.fromkeys(role.pool for role in roles):
        own = [role for role in roles if role.pool == pool]
        pools[pool] = sum(role.kept for role in own) + max(role.call for role in own)
    return pools


HEAD = (
    *("role", "pool", "weights / compute", "weights", "gradients", "moments"),
    *("whole layers", "activations", "KV cache", "of it in host memory"),
)


def memory_table(
    roles: Sequence[RoleMemory],
    device_type: str,
    device_bytes: int | None = None,
    max_columns: int | None = None,
) -> str:
    """The roles with their GiB on each device, and the sum of every pool."""
    lines: list[tuple[str, ...]] = [HEAD]
    for role in roles:
        numbers = (role.weights, role.gradients, role.moments, role.whole, role.activations)
        cells = [_gib(number) for number in (*numbers, role.kv_cache, role.host)]
        lines.append((role.role, role.pool, role.types, *cells))
    sums = [
        f"{pool}: {_gib(total)} GiB on each device at most" + _beside(total, device_bytes)
        for pool, total in pool_bytes(roles).items()
    ]
    for pool in dict.fromkeys(role.pool for role in roles if role.copies):
        copies = sum(role.copies for role in roles if role.pool == pool)
        sums.append(
            f"{pool}: {_gib(copies)} GiB of host memory for each device to write checkpoints from "
            "(trainer.async_save)"
        )
    title = f"Memory (GiB on each device, {device_type}, from shapes; rows of full length)"
    return "\n".join([title, *draw_table(lines, max_columns, 3, flush_right=True), *sums])


def _gib(number: float | None) -> str:
    if number is None:
        return "?"
    return f"{number / GIB:.1f}" if number >= GIB / 10 or not number else f"{number / GIB:.4f}"


def _beside(total: float, device_bytes: int | None) -> str:
    if device_bytes is None:
        return ""
    verdict = "fits" if total <= device_bytes else "does NOT fit"
    return f", of {device_bytes / GIB:.1f}: {verdict}"


def check_fit(roles: Sequence[RoleMemory], device_bytes: int, ways_out: str) -> None:
    """Refuse roles that do not fit on their devices; `ways_out` names the recipe's keys."""
    for pool, total in pool_bytes(roles).items():
        if total > device_bytes:
            parts = "; ".join(_story(role) for role in roles if role.pool == pool)
            raise ConfigError(
                f"Pool {pool!r} does not fit: its roles take {_gib(total)} GiB on each device, "
                f"which has {_gib(device_bytes)}. {parts}. {ways_out}"
            )


def _story(role: RoleMemory) -> str:
    return f"{role.role}: {_gib(role.kept)} kept, {_gib(role.call)} in a call"


def memory_of_this_gpu(device_type: str) -> int | None:
    """Bytes of the first GPU that this process sees; None where it sees none."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)
