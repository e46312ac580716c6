"""What a recipe on rows looks at before a process starts, beyond the configuration alone."""

from __future__ import annotations

from trainer.config.offload import check_offload
from trainer.data.model_config import read_model_config
from trainer.rows.config import RowConfig
from verl_like.errors import ConfigError

POSITIONS = ("max_position_embeddings", "n_positions")
"""What `config.json` of a model may call the number of its positions."""


def preflight(config: RowConfig) -> None:
    """Refuse a model that is not there, or too short for the rows, and offloading on CPUs."""
    model = config.model
    check_offload(config.trainer, {"model": (model.strategy, model.fsdp_config)})
    path, longest = config.model.path, config.data.max_length
    described = read_model_config("model.path", path)
    limit = next((described[name] for name in POSITIONS if name in described), None)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.max_length={longest} tokens, but model.path={path} has {limit} positions. "
            f"Lower it by {longest - limit}."
        )
