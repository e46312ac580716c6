"""Offloading where there is nothing to offload to, refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainer.config.schema import TrainerConfig
from verl_like.errors import ConfigError


def check_offload(
    trainer: TrainerConfig,
    sections: Mapping[str, tuple[str, Any]],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """On CPUs there is one memory: what the user wants moved out of it stays, so it is refused.

    `sections`: the section of each strategy -> (strategy, its `fsdp_config`); `elsewhere` are the
    sections of those whose `fsdp_config` is in another one.
    """
    if device_type_of(trainer) != "cpu" or trainer.nnodes > 1:
        return  # the driver's machine says nothing about those of a cluster
    for section, (strategy, fsdp) in sections.items():
        name = elsewhere.get(section, section)
        keys = [key for key in ("param_offload", "optimizer_offload") if getattr(fsdp, key, None)]
        wanted = [f"{name}.fsdp_config.{key}=true" for key in keys]
        if strategy.endswith("offload"):
            wanted.append(f"{section}.strategy={strategy}")
        if wanted:
            raise ConfigError(
                f"{wanted[0]}: this run is on CPUs, whose only memory is the host's, so nothing "
                "can be moved out of it. Leave it out (strategy: fsdp or shard_grad_op), or take "
                "trainer.device=cuda."
            )


def device_type_of(trainer: TrainerConfig) -> str:
    """cuda or cpu: `trainer.device`, of which auto is what this machine has."""
    import torch

    if trainer.device != "auto":
        return trainer.device
    return "cuda" if torch.cuda.is_available() else "cpu"
