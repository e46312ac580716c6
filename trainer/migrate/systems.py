"""The systems whose command lines are translated; what their run does not read is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.config.compose import load_config
from trainer.config.keys import Key, config_keys
from trainer.config.recipe import Recipe
from trainer.config.schema import RunConfig
from trainer.config.unused_keys import why_unused
from trainer.detached.recipe import DETACHED
from trainer.migrate import coati, openrlhf, trl, verl
from trainer.migrate.command import filled, variables_of
from trainer.migrate.translation import Translation
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError, nearest

SYSTEMS: Mapping[str, Callable[[str], Translation]] = {
    "verl": verl.translate,
    "openrlhf": openrlhf.translate,
    "trl": trl.translate,
    "coati": coati.translate,
    "chatgpt": coati.translate,
}
RECIPES: Mapping[str, Recipe[Any]] = {
    "ppo": PPO,
    "detached": DETACHED,
    "sft": SFT,
    "reward-model": REWARD_MODEL,
    "dpo": DPO,
}
"""Program of a translation -> its recipe."""


def migrate(system: str, text: str) -> Translation:
    """The command line or script `text` of that system, as settings that compose here."""
    if system not in SYSTEMS:
        raise ConfigError(
            f"there is no translation from {system!r}.{nearest(system, SYSTEMS)} There are: "
            f"{', '.join(SYSTEMS)}."
        )
    done = SYSTEMS[system](text)
    try:
        config = _composed(done, variables_of(text))
    except ConfigError as error:
        raise ConfigError(
            f"the command does not start as it is: {error}\n\n{done.report(None)}"
        ) from error

    for key in list(done.settings):
        if reason := _why_unread(config, key.removeprefix("+")):
            done.leave_out(key, reason)
    return done


def _why_unread(config: RunConfig, key: str) -> str | None:
    is_key = not key.startswith(("placement", "role_mapping.", "resource_pool_spec."))
    return why_unused(config, key) if is_key and "engine_kwargs." not in key else None


def _composed(done: Translation, variables: Mapping[str, str]) -> RunConfig:
    """The configuration, with the values of the script's variables where they are known.

    A text that only the shell knows has a stand-in; other settings of the shell's are left out.
    """
    recipe = RECIPES[done.program]
    texts = {key.name for key in config_keys(recipe.schema) if _is_text(key)}
    settings = []
    for key, value in done.settings.items():
        known = filled(value, variables)
        if "$" not in known:
            settings.append(f"{key}={known}")
        elif key in texts:
            settings.append(f"{key}=given")
    config: RunConfig = load_config([], recipe, defaults=settings)
    return config


def _is_text(key: Key) -> bool:
    """Whether any text is a value of it."""
    return key.kind in (str, Any) and not (key.rules.choices or key.rules.registry)
