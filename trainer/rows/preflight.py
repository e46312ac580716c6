"""What a recipe on rows looks at before a process starts, beyond the configuration alone."""

from __future__ import annotations

from trainer.config.offload import check_offload
from trainer.data.model_config import num_positions, read_model_config
from trainer.rows.config import RowConfig
from verl_like.errors import ConfigError
from workers.models.random_init import check_weights


def preflight(config: RowConfig) -> None:
    """Refuse a model that is not there, or too short for the rows, and offloading on CPUs."""
    model = config.model
    check_offload(config.trainer, {"model": (model.strategy, model.fsdp_config)})
    check_weights("model.path", model.path, model.random_init_seed)
    path, longest = config.model.path, config.data.max_length
    limit = num_positions(read_model_config("model.path", path))
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.max_length={longest} tokens, but model.path={path} has {limit} positions. "
            f"Lower it by {longest - limit}."
        )
