"""`detached.maker_settings`: what a maker's rollout has otherwise than the run's.

The numbers of makers are settled while the configuration is composed. A maker's settings are
checked by the rules of the run's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_like.errors import ConfigError, nearest
from workers.config import RolloutConfig

MAKER_SETTINGS = "detached.maker_settings"
ROLLOUT = "actor_rollout_ref.rollout"


def by_number(maker_settings: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings by the number of their maker, as text: `{1: ...}` of a dict or of YAML is `.1`
    of a command.
    """
    found: dict[str, Any] = {}
    for maker, settings in maker_settings.items():
        if str(maker) in found:
            raise ConfigError(
                f"{MAKER_SETTINGS} names maker {maker} twice: {found[str(maker)]} and {settings}. "
                "Say all of it in one."
            )
        found[str(maker)] = settings
    return found


def own_rollout(rollout: RolloutConfig, maker: str, settings: Any) -> RolloutConfig:
    """The rollout of a maker: the run's, with these settings, which have the types of its keys."""
    where = f"{MAKER_SETTINGS}.{maker}"
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"{where}={settings!r} is no setting of a rollout: give keys of {ROLLOUT} with "
            f"their values, as in {where}={{name: hf}}."
        )
    known = [field.name for field in dataclasses.fields(RolloutConfig)]
    typed = OmegaConf.structured(RolloutConfig)
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"{where} names {name!r}, no key of rollout.{nearest(name, known)}")
        try:
            OmegaConf.update(typed, name, value)
        except OmegaConfBaseException as error:
            why = str(error).partition("\n")[0]  # the rest are OmegaConf's own names
            raise ConfigError(f"{where}.{name}={value}: {why}. See {ROLLOUT}.{name}.") from error
    own = OmegaConf.to_object(typed)
    return dataclasses.replace(rollout, **{name: getattr(own, name) for name in settings})
