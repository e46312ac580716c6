"""Devices for a run's plan: this machine's, or those of `trainer.simulate`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config.schema import RunConfig, TrainerConfig
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError, nearest

C = TypeVar("C", bound=RunConfig)
GIB_OF_GPUS = {
    "T4": 14,
    "V100": 15,
    "V100-32GB": 31,
    "L4": 21,
    "A10G": 21,
    "RTX3090": 23,
    "RTX4090": 23,
    "RTX5090": 31,
    "A40": 44,
    "L40S": 44,
    "A6000": 47,
    "A100-40GB": 39,
    "A100": 79,
    "H100": 79,
    "H20": 95,
    "GH200": 94,
    "H200": 139,
    "B200": 178,
    "MI300X": 191,
}
"""GPU -> the memory that its driver lets programs use, in whole GiB."""
GPUS_PER_NODE = 8
"""Number of GPUs that a simulated node has by default."""


@dataclass(frozen=True)
class Devices:
    """The devices of each machine, as far as known."""

    type: str
    """cuda or cpu."""
    num_gpus: int | None
    """GPUs of a machine, used or not; None without any."""
    gpu: str = ""
    """The simulated GPU."""
    gib: float | None = None
    """The memory of the simulated GPU."""

    @property
    def bytes(self) -> int | None:
        """Memory of a GPU that the run uses, or None if unknown."""
        if self.gib is not None:
            return int(self.gib * 2**30)
        if self.type == "cpu" or self.num_gpus is None:
            return None
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory)


def run_devices(trainer: TrainerConfig) -> Devices:
    """Return the GPUs of a machine, this or a simulated one, or CPUs if the run uses them."""
    if trainer.simulate is not None:
        number, gpu = _parsed(trainer.simulate)
        if number % trainer.nnodes:
            raise ConfigError(
                f"--gpus {trainer.simulate} (trainer.simulate) does not divide evenly among "
                f"trainer.nnodes={trainer.nnodes}. Write the GPUs of all machines together."
            )
        gib = _gib_of(trainer.simulate, gpu)
        return Devices("cuda", number // trainer.nnodes, gpu, gib)
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
    on_cpus = trainer.device == "cpu" or (trainer.device == "auto" and num_gpus is None)
    return Devices("cpu" if on_cpus else "cuda", num_gpus)


def with_simulated(config: C, keys: Collection[str]) -> C:
    """Return the configuration of a dry run on the GPUs that `trainer.simulate` names, if any.

    If there are more than eight GPUs and `trainer.nnodes` is not set, there is one node per eight
    GPUs (or per `trainer.n_gpus_per_node`), rounded down.
    """
    trainer = config.trainer
    if trainer.simulate is None:
        return config
    if trainer.device == "cpu":
        raise ConfigError(
            f"--gpus {trainer.simulate} (trainer.simulate) and trainer.device=cpu: a run on CPUs "
            "uses no simulated GPUs. Leave out one of them."
        )
    if "trainer.dry_run" in keys and not trainer.dry_run:
        raise ConfigError(
            f"--gpus {trainer.simulate} (trainer.simulate) and trainer.dry_run=false: a run cannot "
            "train on simulated GPUs. Leave out one of them."
        )
    changes: dict[str, Any] = {"trainer.device": "cuda", "trainer.dry_run": True}
    number, _ = _parsed(trainer.simulate)
    if "trainer.nnodes" not in keys and number > GPUS_PER_NODE:
        is_set = "trainer.n_gpus_per_node" in keys
        per_node = trainer.n_gpus_per_node if is_set else GPUS_PER_NODE
        changes["trainer.nnodes"] = max(1, number // per_node)
    config = replace_keys(config, changes)
    if "trainer.n_gpus_per_node" in keys:
        return config
    return replace_keys(config, {"trainer.n_gpus_per_node": run_devices(config.trainer).num_gpus})


def _parsed(simulate: str) -> tuple[int, str]:
    """Return (number, name) of a text such as 8xH100."""
    match = re.fullmatch(r"(\d+) ?x ?(.+)", simulate.strip())
    if match is None or int(match[1]) == 0:
        raise ConfigError(
            f"--gpus {simulate} (trainer.simulate): write the number and the GPU as 8xH100, or "
            "with the memory of a GPU as 8x80GiB."
        )
    return int(match[1]), match[2].strip()


def _gib_of(simulate: str, gpu: str) -> float:
    memory = re.fullmatch(r"(\d*\.?\d+) ?(?:GiB|GB)?", gpu, re.IGNORECASE)
    if memory:
        if float(memory[1]) > 0:
            return float(memory[1])
    by_name = {_plain(name): gib for name, gib in GIB_OF_GPUS.items()}
    if _plain(gpu) not in by_name:
        raise ConfigError(
            f"--gpus {simulate} (trainer.simulate): {gpu!r} is not a GPU whose memory is "
            f"known.{nearest(gpu, GIB_OF_GPUS)} Known: {', '.join(GIB_OF_GPUS)}. For another GPU, "
            "write its memory: 8x80GiB."
        )
    return by_name[_plain(gpu)]


def _plain(gpu: str) -> str:
    """Return the GPU's name without vendor and punctuation, and without 80GB, the usual size."""
    name = re.sub(r"nvidia|amd|geforce|[^a-z0-9]", "", gpu.lower())
    return name.removesuffix("80gb") or name


def check_offload(trainer: TrainerConfig, sections: Mapping[str, tuple[str, str, Any]]) -> None:
    """Reject offloading on CPUs, whose only memory is the host's.

    `sections`: section with a strategy -> (the strategy, the section with its `fsdp_config`, the
    value of `fsdp_config`).
    """
    if run_devices(trainer).type != "cpu" or trainer.nnodes > 1:
        return  # other machines of a cluster may have GPUs
    for section, (strategy, name, fsdp) in sections.items():
        keys = [key for key in ("param_offload", "optimizer_offload") if getattr(fsdp, key, None)]
        offloads = [f"{name}.fsdp_config.{key}=true" for key in keys]
        if strategy.endswith("offload"):
            offloads.append(f"{section}.strategy={strategy}")
        if offloads:
            raise ConfigError(
                f"{offloads[0]}: this run is on CPUs, which have only host memory, so there is "
                "nothing to offload. Leave out the key (or set strategy to fsdp or "
                "shard_grad_op), set trainer.device=cuda, or check the run with `verl-like check "
                "--gpus 8xH100`."
            )
