"""Memory of the roles of a recipe on rows: how many tokens a pass of theirs has, and the plan."""

from __future__ import annotations

from trainer.config.offload import device_type_of
from trainer.data.model_config import num_positions, read_model_config
from trainer.memory import held_memory, held_model, memory_of_this_gpu, memory_table
from trainer.rows.config import RowConfig
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from workers.config.rows import LONGEST_ROW
from workers.memory import HeldModel, LargestPass, RoleMemory

WAYS_OUT = (
    "Take smaller passes (data.max_token_len_per_gpu, or data.micro_batch_size_per_gpu and "
    "data.max_length), model.enable_gradient_checkpointing=true, model.strategy=fsdp+offload, or "
    "more devices."
)
"""What to do where a pool is too small."""


def held_models(config: RowConfig) -> dict[str, HeldModel]:
    """The models of the roles."""
    found = {role: held_model(config, role) for role in expand_roles(config.role_mapping)}
    return {role: held for role, held in found.items() if held is not None}


def role_memories(config: RowConfig, num_sides: int, device_type: str) -> list[RoleMemory]:
    """Of every role; an item of the data has `num_sides` rows."""
    found = []
    for role, held in held_models(config).items():
        ranks = sum(config.resource_pool_spec[expand_roles(config.role_mapping)[role]])
        largest = largest_pass(config, held, num_sides, ranks)
        found.append(held_memory(config, role, held, device_type, largest))
    return found


def largest_pass(config: RowConfig, held: HeldModel, num_sides: int, ranks: int) -> LargestPass:
    """That of a step on one rank, which never has more than its share of the step's rows."""
    data, length = config.data, longest_row(config)
    num_rows = -(-data.train_batch_size // ranks) * num_sides
    tokens = num_rows * length
    if data.use_dynamic_bsz:
        tokens = min(tokens, data.max_token_len_per_gpu)
    else:
        tokens = min(tokens, data.micro_batch_size_per_gpu * num_sides * length)
    return LargestPass(tokens, tokens if held.head == "token" else num_rows)


def longest_row(config: RowConfig) -> int:
    """Tokens that a row is cut to: by default all that the model takes, but for very long ones."""
    if config.data.max_length is not None:
        return config.data.max_length
    limit = num_positions(read_model_config("model.path", config.model.path))
    return min(LONGEST_ROW, limit or LONGEST_ROW)


def plan_text(config: RowConfig, num_sides: int, max_columns: int | None = None) -> str:
    """The table for the plan, on devices as this machine's, or why there is none."""
    device_type = device_type_of(config.trainer)
    try:
        roles = role_memories(config, num_sides, device_type)
    except (ConfigError, OSError, ValueError) as error:
        return f"Memory: not known: {error}"
    return memory_table(roles, device_type, memory_of_this_gpu(device_type), max_columns)
