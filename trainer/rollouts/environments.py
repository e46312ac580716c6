"""Checks of environments before any process starts. Only a run with an environment imports them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Any

from trainer.data.prompts import PromptSet
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError, nearest
from workers.agents.chat import TurnRenderer
from workers.agents.host import EnvironmentHost, Kind, name_of
from workers.agents.load_environment import full_path
from workers.agents.players import OWN_COLUMNS, spec_of
from workers.columns import ENVIRONMENT
from workers.models.folder import factor_border, model_folder, read_hf_config
from workers.training.passes.packing import SEGMENTS_MAY_NOT_SHARE


def check_environment(config: Any, tokenizer: Any) -> dict[str, Kind]:
    """Reject invalid environment code, or a chat template that does not allow several turns.

    Return each environment's `Kind` by name.
    """
    section = full_paths(config).environment
    if section.path and section.paths:
        raise ConfigError(
            "environment.path and environment.paths are both set. Leave out one of them."
        )
    section.check_by_name()
    longest = config.data.max_prompt_length
    for name in ("", *section.by_name):
        most = section.of(name).max_tokens_per_segment
        if most is not None and most <= longest:
            raise ConfigError(
                f"environment.max_tokens_per_segment={most}{f' of {name}' * bool(name)} leaves no "
                f"tokens after a prompt of data.max_prompt_length={longest}. Raise the first key, "
                "or lower the second one."
            )
    if section.history_tokens == "retokenized":
        folder = model_folder(config.actor_rollout_ref.model.path, weights=False)
        if factor_border(read_hf_config(folder)) is not None:
            raise ConfigError(SEGMENTS_MAY_NOT_SHARE)
    with closing(EnvironmentHost(spec_of(section, tokenizer), section.step_timeout_s)) as host:
        for kind in host.kinds.values():
            TurnRenderer(tokenizer, kind.tools, [tokenizer.eos_token_id])
        return host.kinds


def note_players(kinds: Mapping[str, Kind], *prompt_sets: PromptSet | None) -> None:
    """Tell the prompt sets the players of every row, if environments have several players."""
    if not any(kind.players for kind in kinds.values()):
        return
    for prompts in prompt_sets:
        if prompts is not None:
            prompts.players_of = lambda row: kinds[name_of(kinds, row)].players


def full_paths(config: Any) -> Any:
    """Make the paths of environment files absolute in the configuration.

    This is needed because workers may run in another folder.
    """
    section = config.environment
    paths = {
        "environment.path": full_path(section.path) if section.path else "",
        "environment.paths": {name: full_path(path) for name, path in section.paths.items()},
        "environment.tools": [full_path(path) for path in section.tools],
        "environment.tool_call_parser": section.tool_call_parser
        and full_path(section.tool_call_parser),
    }
    return replace_keys(config, paths)


def check_row_columns(kinds: Mapping[str, Kind], data_columns: Collection[str]) -> None:
    """Reject data that lacks a column which an environment's `reset` needs."""
    columns = {*data_columns, *OWN_COLUMNS}
    if kinds and "" not in kinds and ENVIRONMENT not in columns:
        raise ConfigError(
            "environment.paths is set, but the rows of data.train_files have no column "
            f"{ENVIRONMENT!r} that names one of {', '.join(kinds)}."
        )
    for label, name in ((label, name) for label, kind in kinds.items() for name in kind.columns):
        if name not in columns:
            raise ConfigError(
                f"environment{label and f' {label}'}: `reset` has the parameter {name!r}, but the "
                f"rows of data.train_files have no such column, only {', '.join(sorted(columns))}."
                f"{nearest(name, [*columns, 'row', 'rng'])} `reset` can also take row (all "
                "columns) and rng."
            )
