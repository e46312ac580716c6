"""What a recipe on rows looks at before a process starts, beyond the configuration alone."""

from __future__ import annotations

from trainer.config.checks import check_ranks
from trainer.config.offload import check_offload, device_type_of
from trainer.data.model_config import num_positions, read_model_config
from trainer.memory import check_fit, memory_of_this_gpu
from trainer.rows.config import RowConfig
from trainer.rows.memory import WAYS_OUT, held_models, longest_row, role_memories
from verl_like.errors import ConfigError
from workers.models.memory_shapes import check_adapter
from workers.models.random_init import check_weights


def preflight(config: RowConfig, num_sides: int) -> None:
    """Refuse models that are not there, too short for the rows or too large, or not to be sharded
    or adapted so; offloading on CPUs.

    An item of the data has `num_sides` rows.
    """
    check_offload(config.trainer, {"model": (config.model.strategy, config.model.fsdp_config)})
    longest = longest_row(config)
    for role, own in held_models(config).items():
        path = own.model.path
        check_ranks(config, role, own.sharding)
        check_weights(own.key, path, own.model.random_init_seed)
        limit = num_positions(read_model_config(own.key, path))
        if limit is not None and longest > limit:
            raise ConfigError(
                f"data.max_length={longest} tokens, but {own.key}={path} has {limit} positions. "
                f"Lower it by {longest - limit}."
            )
        check_adapter(own.model, own.head)

    device_type = device_type_of(config.trainer)
    device_bytes = memory_of_this_gpu(device_type)
    if device_bytes is not None:
        check_fit(role_memories(config, num_sides, device_type), device_bytes, WAYS_OUT)
