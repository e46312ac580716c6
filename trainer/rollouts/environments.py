"""Environments and tools, looked at before a process of the run starts."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from typing import Any

from trainer.data.files import is_num_games
from verl_like.config_key import changed
from verl_like.errors import ConfigError, nearest
from workers.agents.chat import TurnRenderer
from workers.agents.environment import in_full
from workers.agents.host import EnvironmentHost
from workers.agents.players import OWN_COLUMNS, spec_of
from workers.config import plays
from workers.models.folder import model_folder
from workers.models.hf_config import read_hf_config
from workers.models.rotary import factor_border
from workers.training.row_proof import SPLITS


def check_environment(config: Any, tokenizer: Any, refuses_tools: str = "") -> list[str]:
    """Refuse code that is not there or cannot be called, and a template that does not take turns;
    tools, too, where there is a reason that `refuses_tools`.

    Gives the columns that the environment needs of every row.
    """
    if not plays(config):
        return []
    own = with_full_paths(config).environment
    if own.history == "as_template":
        folder = model_folder(config.actor_rollout_ref.model.path, weights=False)
        if factor_border(read_hf_config(folder)) is not None:
            raise ConfigError(SPLITS)
    with closing(EnvironmentHost(spec_of(own, tokenizer), own.step_timeout_s)) as host:
        columns: list[str] = host.columns
        if refuses_tools and host.tools:
            names = ", ".join(tool["function"]["name"] for tool in host.tools)
            raise ConfigError(
                f"environment={own.path}: its methods {names} are tools. {refuses_tools} Put an "
                "underscore before methods that are none, or use a class without such methods."
            )
        TurnRenderer(tokenizer, host.tools, [tokenizer.eos_token_id])
    return columns


def with_full_paths(config: Any) -> Any:
    """Return the configuration with full paths of an environment's files.

    Workers may run in another folder.
    """
    if not plays(config):
        return config
    own = config.environment
    paths = {
        "environment.path": in_full(own.path) if own.path else "",
        "environment.tools": [in_full(path) for path in own.tools],
        "environment.call_parser": own.call_parser and in_full(own.call_parser),
    }
    return changed(config, paths)


def check_games(config: Any) -> None:
    """Refuse rows without a prompt where no environment says what there is to read."""
    for setting in ("train_files", "val_files"):
        files = getattr(config.data, setting)
        if is_num_games(files) and not plays(config):
            raise ConfigError(
                f"data.{setting}={files} is a number of games, and there is no environment "
                "that plays them: set environment=FILE.py:CLASS, or give a file."
            )


def check_row_columns(needed: Collection[str], there: Collection[str]) -> None:
    """Refuse rows of the data without a column that the environment's `reset` needs."""
    columns = {*there, *OWN_COLUMNS}
    for name in needed:
        if name not in columns:
            raise ConfigError(
                f"environment: its reset needs {name!r}, and the rows of data.train_files have no "
                f"such column, only {', '.join(sorted(columns))}.{nearest(name, columns)}"
            )
