"""Checks of models and memory before any process starts, for recipes on rows."""

from __future__ import annotations

from typing import TypeVar

from trainer.config.checks import check_axes_of, check_checkpoint_of, check_passes, check_ranks
from trainer.config.devices import check_offload, run_devices
from trainer.data.model_config import num_positions, read_model_config
from trainer.memory import (
    UNKNOWN,
    check_fit,
    memory_table,
    model_memory,
    role_models,
    with_fewest_recomputed_layers,
)
from trainer.rows.config import RowConfig
from verl_like.errors import ConfigError
from verl_like.placement.pools import expand_roles
from workers.config.rows import LONGEST_ROW
from workers.memory import LargestPass, RoleMemory
from workers.models.load import check_weights
from workers.models.memory_shapes import check_adapter
from workers.parallel.sharding import ParallelDims, dims_of
from workers.training.role_model_spec import RoleModelSpec

R = TypeVar("R", bound=RowConfig)

WAYS_OUT = {
    "activations": "use smaller passes (data.max_token_len_per_gpu, or "
    "data.micro_batch_size_per_gpu and data.max_length), or set "
    "model.enable_gradient_checkpointing=true if it is false",
    "model states": "set model.strategy=fsdp+offload, or use more devices",
}
"""Advice if the devices of a pool have too little memory."""


def preflight(config: RowConfig) -> None:
    """Reject models that are missing, too large, or whose context is too short for the rows.

    Also reject shardings and adapters that do not fit the model, and offloading on CPUs.
    """
    models, sections = role_models(config), {}
    for model in models.values():
        section = model.key.removesuffix(".path").removesuffix(".model")
        sections[section] = (model.strategy if model.trains else "", section, model.fsdp)
    check_offload(config.trainer, sections)
    longest = longest_row(config)
    for role, model in models.items():
        path = model.model.path
        check_ranks(config, role, model.sharding)
        if config.trainer.simulate is None:
            check_weights(model.key, path, model.model)
        limit = num_positions(read_model_config(model.key, path))
        if limit is not None and longest > limit:
            raise ConfigError(
                f"data.max_length={config.data.max_length or 'null'}: rows have up to {longest} "
                f"tokens, but {model.key}={path} has {limit} positions. Set data.max_length to "
                f"{limit} or less."
            )
        check_axes_of(config, role, model)
        if model.trains:
            check_checkpoint_of(config, role, model)
            data = config.data
            at_once = None if data.use_dynamic_bsz else data.micro_batch_size_per_gpu
            rows = "data.train_batch_size", data.train_batch_size
            check_passes(config, role, model, rows, ("data.micro_batch_size_per_gpu", at_once))
        check_adapter(model.model, model.head)

    devices = run_devices(config.trainer)
    if devices.bytes is not None:
        roles = role_memories(config, devices.type)
        check_fit(roles, devices.type, devices.bytes, WAYS_OUT)


def resolve_config(config: R) -> R:
    """Return the configuration with as few recomputed layers as the memory of GPUs allows."""
    devices = run_devices(config.trainer)
    return with_fewest_recomputed_layers(
        config, devices, role_models(config), lambda tried: role_memories(tried, devices.type)
    )


def role_memories(config: RowConfig, device_type: str) -> list[RoleMemory]:
    """Return the memory of every role."""
    memories = []
    for role, model in role_models(config).items():
        ranks = sum(config.resource_pool_spec[expand_roles(config.role_mapping)[role]])
        dims = dims_of(ranks, model.sharding)
        largest = largest_pass(config, model, dims)
        memories.append(model_memory(config, role, model, device_type, largest))
    return memories


def largest_pass(config: RowConfig, model: RoleModelSpec, dims: ParallelDims) -> LargestPass:
    """Return the largest pass of a rank, which never has more than the rank's rows of a step."""
    length = -(-longest_row(config) // dims.sp)
    num_rows = -(-config.data.train_batch_size // dims.data_size) * config.num_sides
    tokens = min(num_rows * length, pass_tokens(config, length))
    return LargestPass(tokens, tokens if model.head == "token" else num_rows)


def pass_tokens(config: RowConfig, length: int) -> int:
    """Return the limit of a pass over rows of this length."""
    data = config.data
    of_items = data.micro_batch_size_per_gpu * config.num_sides * length
    return data.max_token_len_per_gpu if data.use_dynamic_bsz else of_items


def longest_row(config: RowConfig) -> int:
    """Return the maximum tokens per row; by default, the model's limit, at most `LONGEST_ROW`."""
    if config.data.max_length is not None:
        return config.data.max_length
    limit = num_positions(read_model_config("model.path", config.model.path))
    return min(LONGEST_ROW, limit or LONGEST_ROW)


def plan_text(config: RowConfig, brief: bool = False, heading: str = "Memory") -> str:
    """Return the memory table for this run's devices, or the reason why there is none."""
    devices = run_devices(config.trainer)
    try:
        roles = role_memories(resolve_config(config), devices.type)
    except (ConfigError, OSError, ValueError) as error:
        return f"{UNKNOWN}: {error}"
    return memory_table(roles, devices, brief, heading)
