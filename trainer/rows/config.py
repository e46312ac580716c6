"""Base classes and checks for the configuration of recipes on rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.config.schema import RunConfig
from trainer.data.config import ValidatingTrainerConfig
from verl_like.config_key import config_field
from verl_like.errors import ConfigError
from workers.config.rows import LONGEST_ROW, RowWorkerConfig


@dataclass(kw_only=True)
class RowConfig(RunConfig, RowWorkerConfig):
    """A run, and the model that it trains on rows."""

    @property
    def num_sides(self) -> int:
        """Rows per item of the data: 2 for pairs."""
        return 1


def trainer_section(cls: str, experiment_name: str) -> Any:
    """Return the field `trainer` of a recipe on rows; `cls` is its trainer's dotted path."""
    return config_field(
        factory=partial(ValidatingTrainerConfig, cls=cls, experiment_name=experiment_name)
    )


OPTIMIZERS = "workers.training.optim"
"""The module that registers optimizers."""


def check_rows_config(config: RowConfig) -> None:
    """Run the checks across keys that these recipes share."""
    from workers.parallel.sharding import resolve_sharding
    from workers.training.optim import check_optim

    model = config.model
    resolve_sharding(model.strategy, model.fsdp_config, config.parallel, "model.fsdp_config")
    check_optim(config.optim, "optim")
    data, sp = config.data, config.parallel.sp
    room, longest = data.max_token_len_per_gpu, data.max_length or LONGEST_ROW
    row, pair = f"a row of up to {longest} tokens", f"a pair of rows of up to {longest} tokens each"
    for num_sides, subject in ((1, row), (2, pair))[: config.num_sides]:
        if data.use_dynamic_bsz and num_sides * longest > room * sp:
            ranks = f" x {sp} ranks (parallel.sp)" * (sp > 1)
            raise ConfigError(
                f"data.max_length={data.max_length or 'null'}: {subject} may not fit into a pass "
                f"of data.max_token_len_per_gpu={room} tokens{ranks}. Set data.max_length to "
                f"{room * sp // num_sides} or less, or data.max_token_len_per_gpu to "
                f"{-(-num_sides * longest // sp)} or more."
            )
