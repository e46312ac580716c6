"""From command-line overrides to a checked `PPOConfig`.

`load_config` is the way in for code and tests; `trainer.main_ppo` calls `prepare_overrides` and
`from_composed` around Hydra's main, which composes by itself.
"""

from __future__ import annotations

import dataclasses
import logging
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import presets as plan
from trainer.config.schema import PPOConfig
from verl_like.errors import ConfigError, nearest

CONFIG_DIR = Path(__file__).resolve().parent
CONFIG_NAME = "ppo_trainer"

ConfigStore.instance().store(name="ppo_schema", node=PPOConfig)
OmegaConf.register_new_resolver(
    "share",
    lambda pool, preset_pools, *, _root_: plan.share(pool, preset_pools, _root_),
    replace=True,
)


def config_keys(schema: type = PPOConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, type) of the tree, sections included, in declaration order."""
    for name, kind in typing.get_type_hints(schema).items():
        yield prefix + name, kind
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from config_keys(kind, f"{prefix}{name}.")


def prepare_overrides(overrides: Sequence[str]) -> list[str]:
    """What Hydra gets: every key is known, shorthands are written out, and pools and roles need no
    `+`.
    """
    overrides = plan.expand_shorthands(overrides)
    check_overrides(overrides)
    takes_any = tuple(section + sign for section in open_sections() for sign in ".=")
    return ["++" + o if o.startswith(takes_any) else o for o in overrides]


def open_sections() -> list[str]:
    """Sections that take any key, such as role_mapping."""
    return [key for key, kind in config_keys() if typing.get_origin(kind) is dict]


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse keys that do not exist, with the nearest ones; Hydra would let `+section.typo=`
    through.
    """
    keys, takes_any = dict(config_keys()), tuple(f"{section}." for section in open_sections())
    for key in override_keys(overrides):
        known = key in keys or key == "placement" or key.split(".")[0].split("/")[0] == "hydra"
        if known or key.startswith(takes_any):
            continue
        leaf = key.rpartition(".")[2]
        twins = [k for k in keys if k.rpartition(".")[2] == leaf]
        hint = (
            f" Did you mean {' or '.join(map(repr, twins))}?"
            if twins
            else nearest(key, [*keys, "placement"])
        )
        raise ConfigError(f"There is no key {key!r}.{hint} All keys: verl-like ppo --cfg job")


def override_keys(overrides: Sequence[str]) -> list[str]:
    """The dotted keys that `overrides` set, add or delete; those inside `section={key: value}`,
    too.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as err:
        raise ConfigError(str(err)) from err
    return [key for override in parsed for key in _keys_in(override.key_or_group, override.value())]


def _keys_in(key: str, value: Any) -> list[str]:
    if not isinstance(value, dict) or not value:
        return [key]
    return [found for name, inner in value.items() for found in _keys_in(f"{key}.{name}", inner)]


def from_composed(composed: DictConfig, overrides: Sequence[str]) -> PPOConfig:
    """Hydra's tree merged back into the schema, resolved, settled and checked."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(PPOConfig), composed)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as err:
        raise _our_own(err) or ConfigError(str(err)) from err
    assert isinstance(config, PPOConfig), f"the schema gave a {type(config).__name__}"
    section, keys = "resource_pool_spec.", override_keys(overrides)
    notices = plan.settle(
        config, {key.removeprefix(section) for key in keys if key.startswith(section)}
    )
    from trainer.config.checks import (
        validate,  # it looks into the losses, hence torch: not on the way to --help
    )
    from trainer.config.unused_keys import check_unread

    validate(config)
    for notice in notices + check_unread(config, keys):
        logging.getLogger(__name__).warning(notice)
    return config


def _our_own(err: BaseException) -> ConfigError | None:
    """The `ConfigError` of a resolver, which OmegaConf wraps."""
    cause = err.__cause__ or err.__context__
    while cause is not None and not isinstance(cause, ConfigError):
        cause = cause.__cause__ or cause.__context__
    return cause


def load_config(overrides: Sequence[str]) -> PPOConfig:
    """`key=value` strings, as on the command line -> the configuration of a run."""
    overrides = prepare_overrides(overrides)
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            composed = compose(CONFIG_NAME, overrides=overrides)
    except HydraException as err:
        raise ConfigError(f"{err}\n{err.__cause__}" if err.__cause__ else str(err)) from err
    return from_composed(composed, overrides)
