"""What a strategy and its `fsdp_config` come to, in names and numbers, without torch.

`workers.parallel.fsdp` does it to a module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_like.errors import ConfigError

if TYPE_CHECKING:
    from workers.config import FrozenFSDPConfig, FSDPConfig

STRATEGIES: dict[str, tuple[str, bool]] = {
    "single": ("single", False),
    "ddp": ("ddp", False),
    "fsdp": ("fsdp", False),
    "fsdp+offload": ("fsdp", True),
    "fsdp_offload": ("fsdp", True),
    "shard_grad_op": ("shard_grad_op", False),
    "shard_grad_op+offload": ("shard_grad_op", True),
}
"""Name -> how the model is sharded, and whether shards and moments rest in host memory.

fsdp shards weights, gradients and optimizer state, and gathers the weights of a layer for its
forward pass and again for its backward pass (ZeRO-3). shard_grad_op gathers them once a mini-batch
and keeps them whole until its last backward pass; gradients and optimizer state are sharded all the
same (ZeRO-2). Between calls both hold their shards alone.
"""


@dataclass(frozen=True)
class Sharding:
    """What a strategy and an `fsdp_config` come to."""

    strategy: str
    """single, ddp, fsdp or shard_grad_op."""
    fsdp_size: int
    param_offload: bool
    optimizer_offload: bool


def settle(
    strategy: str, config: FSDPConfig | FrozenFSDPConfig, section: str = "fsdp_config"
) -> Sharding:
    """The settings of `fsdp_config` that a strategy names; what the user set there must agree."""
    base, offloads = STRATEGIES[strategy]
    whole = base in ("single", "ddp")
    if whole and config.fsdp_size not in (-1, 1):
        raise ConfigError(
            f"strategy={strategy} keeps the whole model on every rank, "
            f"{section}.fsdp_size={config.fsdp_size} shards it; set strategy=fsdp, or leave "
            f"{section}.fsdp_size at -1."
        )

    offload = {}
    for name in ("param_offload", "optimizer_offload"):
        wanted = getattr(config, name, None)  # a frozen module has no optimizer
        if offloads and wanted is False:
            raise ConfigError(
                f"strategy={strategy} and {section}.{name}=False contradict each other; drop one."
            )
        offload[name] = offloads or bool(wanted)
    return Sharding(base, 1 if whole else config.fsdp_size, **offload)


def data_axes(world_size: int, sharding: Sharding) -> dict[str, int]:
    """Sizes of the mesh's axes for one role's ranks, by name."""
    if sharding.strategy == "single" and world_size > 1:
        raise ConfigError(
            f"strategy=single is for a pool of one process, this one has {world_size}; take ddp "
            "or fsdp."
        )
    size = world_size if sharding.fsdp_size == -1 else sharding.fsdp_size
    if size < 1 or world_size % size:
        valid = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(
            f"fsdp_config.fsdp_size={sharding.fsdp_size} does not divide the {world_size} ranks; "
            f"valid: -1 (all), {valid}."
        )
    return {"replicate": world_size // size, "shard": size}
