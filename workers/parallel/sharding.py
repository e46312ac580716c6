"""Interpret a strategy and its `fsdp_config` as names and numbers; does not import torch.

`workers.parallel.fsdp` applies the result to a module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_like.errors import ConfigError, nearest_divisors
from workers.config.model import STRATEGIES
from workers.parallel.dims import ParallelDims

if TYPE_CHECKING:
    from workers.config import FrozenFSDPConfig, FSDPConfig, ParallelConfig

SMALL_ELEMENTS = 16 * 2**20
"""Largest model that is one FSDP2 unit, in weights: 64 MiB in float32, plus gradients."""


def is_one_unit(num_weights: int) -> bool:
    """True if FSDP2 gathers a model of this size as a whole, not layer by layer."""
    return num_weights <= SMALL_ELEMENTS


@dataclass(frozen=True)
class Sharding:
    """The sharding settings that follow from a strategy and an `fsdp_config`."""

    strategy: str
    """single, ddp, fsdp or shard_grad_op."""
    fsdp_size: int
    param_offload: bool
    optimizer_offload: bool
    sp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    pp_schedule: str = "1f1b"


def resolve_sharding(
    strategy: str,
    config: FSDPConfig | FrozenFSDPConfig,
    parallel: ParallelConfig | None = None,
    section: str = "fsdp_config",
    quantization: str | None = None,
) -> Sharding:
    """Return the sharding for a strategy; raise if the user's `fsdp_config` contradicts it.

    `fsdp_size` and `parallel.shard` both set the number of shards. Quantized weights are whole
    on every rank.
    """
    base, offloads = STRATEGIES["ddp" if quantization else strategy]
    unsharded = base in ("single", "ddp")
    size, name = config.fsdp_size, f"{section}.fsdp_size"
    axes: dict[str, Any] = {} if parallel is None else dict(vars(parallel))
    cut = {"tp": "splits linear layers", "pp": "gives every rank only some layers"}
    for axis, why in cut.items():
        if quantization and axes.get(axis, 1) > 1:
            raise ConfigError(
                f"{axes_key(section)}.{axis}={axes[axis]} {why}, but quantization={quantization} "
                f"keeps all linear weights on every rank. Set {axes_key(section)}.{axis}=1. If the "
                f"model does not fit a rank as {quantization}, leave out the quantization instead."
            )
    shard = axes.pop("shard", -1)
    if shard != -1 and size not in (-1, shard):
        raise ConfigError(
            f"{name}={size} and {axes_key(section)}.shard={shard} both set the number of shards, "
            "but differ. Set only one."
        )
    if size == -1 and shard != -1:
        size, name = shard, f"{axes_key(section)}.shard"
    if quantization and size not in (-1, 1):
        raise ConfigError(
            f"quantization={quantization} keeps the whole model on every rank, but {name}={size}. "
            f"Set {name} to 1, or leave out the quantization."
        )
    if quantization and config.param_offload:
        raise ConfigError(
            f"quantization={quantization} keeps all weights on the device, and {section}."
            "param_offload=true would offload them. Leave one of the keys out."
        )
    if unsharded and size not in (-1, 1):
        raise ConfigError(
            f"strategy={strategy} keeps the whole model on every rank, but {name}={size} shards "
            f"it. Set strategy=fsdp, or leave {name} at -1."
        )

    offload: dict[str, Any] = {}
    for name in ("param_offload", "optimizer_offload"):
        wanted = getattr(config, name, None)  # a frozen module has no optimizer
        if offloads and wanted is False:
            raise ConfigError(
                f"strategy={strategy} and {section}.{name}=False contradict each other. Leave out "
                f"{name} to offload, or set strategy={base} not to."
            )
        offload[name] = offloads or bool(wanted)
    return Sharding(base, 1 if unsharded else size, **offload, **axes)


def axes_key(section: str) -> str:
    """Return the key of the `parallel` section that belongs to this `fsdp_config` section."""
    prefix = f".{section.removesuffix('fsdp_config')}"
    if prefix.endswith(".model.") or prefix == ".ref.":  # a sibling of the section `parallel`
        prefix = prefix.removesuffix("model.").removesuffix("ref.")
    return f"{prefix}parallel".lstrip(".")


def dims_of(num_ranks: int, sharding: Sharding) -> ParallelDims:
    """Return the sizes of the axes of a role's ranks."""
    if sharding.strategy == "single" and num_ranks > 1:
        raise ConfigError(
            f"strategy=single needs a pool of one process, but this pool has {num_ranks}. Set "
            "strategy=ddp or fsdp."
        )
    model_size = sharding.pp * sharding.sp * sharding.tp
    data_size, is_left = divmod(num_ranks, model_size)
    if is_left:
        raise ConfigError(
            f"parallel.pp x sp x tp = {sharding.pp} x {sharding.sp} x {sharding.tp} = {model_size} "
            f"ranks per model copy, which does not divide the {num_ranks} ranks of the pool. Use a "
            f"product that does (nearest: {nearest_divisors(model_size, num_ranks)}), or give the "
            "pool more processes."
        )
    size = data_size if sharding.fsdp_size == -1 else sharding.fsdp_size
    if size < 1 or data_size % size:
        valid = ", ".join(str(n) for n in range(1, data_size + 1) if data_size % n == 0)
        quotient = f"{num_ranks} / {model_size} = " if model_size > 1 else ""
        raise ConfigError(
            f"parallel.shard or fsdp_config.fsdp_size={sharding.fsdp_size} does not divide the "
            f"{quotient}{data_size} ranks; valid: -1 (all), {valid}."
        )
    dims = ParallelDims(
        pp=sharding.pp,
        replicate=data_size // size,
        shard=size,
        sp=sharding.sp,
        tp=sharding.tp,
        ep=sharding.ep,
    )
    if dims.ep > 1:
        _check_experts(dims, sharding.strategy)
    return dims


def _check_experts(dims: ParallelDims, strategy: str) -> None:
    """Reject numbers of ranks over which the experts cannot be spread."""
    key = f"parallel.ep={dims.ep}"
    if dims.tp > 1:
        raise ConfigError(
            f"{key} keeps whole experts on their ranks, but parallel.tp={dims.tp} splits each "
            "expert over its ranks. Set one of them to 1."
        )
    if strategy in ("single", "ddp"):
        raise ConfigError(
            f"{key} distributes the experts over ranks, but strategy={strategy} (which "
            "quantized weights imply) keeps the whole model on every rank. Set strategy=fsdp "
            "without quantization, or leave parallel.ep at 1."
        )
    size = dims.shard * dims.sp
    if size % dims.ep:
        raise ConfigError(
            f"{key} does not divide the {size} ranks that share the weights (shard x sp = "
            f"{dims.shard} x {dims.sp}); nearest that do: {nearest_divisors(dims.ep, size)}."
        )
