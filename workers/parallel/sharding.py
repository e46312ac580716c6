"""The parallel axes of a role's ranks, and how a strategy sets them; does not import torch.

    pp         different layers (pipeline stages)
    replicate  a full copy of the model, different rows
    shard      a shard of every weight, different rows (FSDP)
    sp         the same rows, different tokens of them (sequence parallel)
    tp         the same tokens, a shard of the matrices (tensor parallel)

Along tp, rank numbers are consecutive; pp is the slowest axis. Rows of a batch are divided over
replicate x shard. Ranks that differ only along pp, sp or tp have the same rows and form one model
group. For experts, the axes shard x sp are divided differently (tp is then 1): groups of ep
consecutive ranks have different experts, and FSDP shards each expert over the efsdp ranks that have
it. `workers.parallel.fsdp` applies the result to a module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_like.errors import ConfigError, nearest_divisors
from workers.config.model import STRATEGIES

if TYPE_CHECKING:
    from workers.config import FrozenFSDPConfig, FSDPConfig, ParallelConfig

AXES = ("pp", "replicate", "shard", "sp", "tp")
"""Axes in the order of the mesh, the fastest last."""
DATA, LOSS, MODEL = ("replicate", "shard"), ("replicate", "shard", "sp"), ("pp", "sp", "tp")
"""Axes along which ranks have, in this order: different rows, different tokens, the same rows."""


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the parallel axes."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    def axes(self) -> dict[str, int]:
        """Return the sizes by name, in the order of the mesh."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def world(self) -> int:
        """Number of ranks of the role."""
        return math.prod(self.axes().values())

    def describe(self) -> str:
        """Return the axes as text, such as `shard 2, tp 4`; "" if FSDP is the only axis."""
        sizes = {**self.axes(), "ep": self.ep}
        shown = sizes if self.world != self.shard or self.ep > 1 else {}
        return ", ".join(f"{name} {size}" for name, size in shown.items() if size > 1)

    @property
    def data_size(self) -> int:
        """Number of chunks that a batch is divided into."""
        return self.replicate * self.shard

    @property
    def model_size(self) -> int:
        """Number of ranks that have the same rows."""
        return self.pp * self.sp * self.tp

    @property
    def per_stage(self) -> int:
        """Number of ranks that have the same layers; their numbers are consecutive."""
        return self.world // self.pp

    @property
    def efsdp(self) -> int:
        """Number of ranks over which the weights of an expert are sharded."""
        return self.shard * self.sp * self.tp // self.ep

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank along every axis."""
        position = {}
        for name in reversed(AXES):
            rank, position[name] = divmod(rank, getattr(self, name))
        return position

    def data_rank(self, rank: int) -> int:
        """Return the number of the chunk of a batch that a rank gets."""
        at = self.coordinates(rank)
        return at["replicate"] * self.shard + at["shard"]

    def is_collect(self, rank: int) -> bool:
        """True for the first rank of a group's last stage, which returns the group's results."""
        at = self.coordinates(rank)
        return at["pp"] == self.pp - 1 and at["sp"] == at["tp"] == 0


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
        offload_setting = getattr(config, name, None)  # a frozen module has no optimizer
        if offloads and offload_setting is False:
            raise ConfigError(
                f"strategy={strategy} and {section}.{name}=False contradict each other. Leave out "
                f"{name} to offload, or set strategy={base} not to."
            )
        offload[name] = offloads or bool(offload_setting)
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
