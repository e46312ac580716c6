"""What checking the configuration of a recipe on rows needs to know."""

from __future__ import annotations

from trainer.rows.config import RowConfig
from verl_like.errors import ConfigError
from workers.config.rows import LONGEST_ROW


def load_registries() -> None:
    """Import what registers optimizers; it imports torch."""
    import workers.training.optim  # noqa: F401


def check_rows_config(config: RowConfig) -> None:
    """The rules between fields that all of them have."""
    from workers.parallel.fsdp import settle

    settle(config.model.strategy, config.model.fsdp_config, "model.fsdp_config")
    data, longest = config.data, config.data.max_length or LONGEST_ROW
    if data.use_dynamic_bsz and longest > data.max_token_len_per_gpu:
        raise ConfigError(
            f"data.max_length={longest} tokens does not fit into a pass of "
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} tokens; lower the one, or "
            "raise the other."
        )


def check_pairs_fit(config: RowConfig) -> None:
    """The rule of recipes whose rows are pairs."""
    data, longest = config.data, config.data.max_length or LONGEST_ROW
    if data.use_dynamic_bsz and 2 * longest > data.max_token_len_per_gpu:
        raise ConfigError(
            f"Two responses of data.max_length={longest} tokens do not fit into a pass of "
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} tokens, and a pair is in one "
            "pass; lower the one, or raise the other."
        )
