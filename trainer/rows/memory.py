"""Memory of the roles of a recipe on rows: shown in its plan, and held against the device's.

`trainer.memory` counts a model's; here is how many tokens a pass over rows has.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.config.offload import device_type_of
from trainer.memory import (
    LargestPass,
    RoleMemory,
    copied_contents,
    engine_memory,
    memory_of_this_gpu,
    memory_table,
)
from trainer.rows.config import RowConfig
from trainer.rows.models import RowModel, longest_row
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles

WAYS_OUT = (
    "Take smaller passes (data.max_token_len_per_gpu, or data.micro_batch_size_per_gpu and "
    "data.max_length), model.enable_gradient_checkpointing=true, model.strategy=fsdp+offload, or "
    "more devices."
)
"""What to do where a pool is too small."""


def role_memories(
    config: RowConfig, models: Mapping[str, RowModel], num_sides: int, device_type: str
) -> list[RoleMemory]:
    """Of every role; an item of the data has `num_sides` rows."""
    contents = config.checkpoint.save_contents
    found = []
    for role, own in models.items():
        pool = expand_roles(config.role_mapping)[role]
        ranks = sum(config.resource_pool_spec[pool])
        found.append(
            engine_memory(
                role,
                pool,
                ranks,
                own.model,
                own.head,
                own.sharding,
                device_type,
                largest_pass(config, own, num_sides, ranks),
                trains=own.trains,
                copied=copied_contents(config.trainer, contents) if own.trains else (),
            )
        )
    return found


def largest_pass(config: RowConfig, own: RowModel, num_sides: int, ranks: int) -> LargestPass:
    """That of a step on one rank, which never has more than its share of the step's rows."""
    data, length = config.data, longest_row(config)
    num_rows = -(-data.train_batch_size // ranks) * num_sides
    tokens = num_rows * length
    if data.use_dynamic_bsz:
        tokens = min(tokens, data.max_token_len_per_gpu)
    else:
        tokens = min(tokens, data.micro_batch_size_per_gpu * num_sides * length)
    return LargestPass(tokens, tokens if own.head == "token" else num_rows)


def plan_text(
    config: RowConfig,
    models: Mapping[str, RowModel],
    num_sides: int,
    max_columns: int | None = None,
) -> str:
    """The table for the plan, on devices as this machine's, or why there is none."""
    device_type = device_type_of(config.trainer)
    try:
        roles = role_memories(config, models, num_sides, device_type)
    except (ConfigError, OSError, ValueError) as error:
        return f"Memory: not known: {error}"
    return memory_table(roles, device_type, memory_of_this_gpu(device_type), max_columns)
