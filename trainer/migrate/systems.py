"""The systems whose command lines are translated; what their run does not read is left out."""

from __future__ import annotations

from trainer.config.compose import compose_tree, from_composed, prepare_overrides
from trainer.config.unused_keys import why_unused
from trainer.migrate.openrlhf import translate as openrlhf
from trainer.migrate.translation import Translation
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from verl_like.errors import ConfigError, nearest

SYSTEMS = {"openrlhf": openrlhf.translate}
REQUIRED = ("actor_rollout_ref.model.path", "data.train_files")
"""Keys that a run cannot do without, which a variable of the shell often gives."""


def migrate(system: str, text: str) -> Translation:
    """The command line or script `text` of that system, as settings that compose here."""
    if system not in SYSTEMS:
        raise ConfigError(
            f"there is no translation from {system!r}.{nearest(system, SYSTEMS)} There are: "
            f"{', '.join(SYSTEMS)}."
        )
    done = SYSTEMS[system](text)
    try:
        config = _composed(done)
    except ConfigError as error:
        raise ConfigError(
            f"the command does not start as it is: {error}\n\n{done.report(None)}"
        ) from error

    for key in list(done.settings):
        if reason := _why_unread(config, key.removeprefix("+")):
            value = done.settings.pop(key)
            done.unread.append(f"{key}={value}: {reason}")
    return done


def _why_unread(config: PPOConfig, key: str) -> str | None:
    is_key = not key.startswith(("placement", "role_mapping.", "resource_pool_spec."))
    return why_unused(config, key) if is_key and "engine_kwargs." not in key else None


def _composed(done: Translation) -> PPOConfig:
    """The configuration, but for settings that a variable of the shell will give."""
    settings = [override for override in done.overrides() if "$" not in override]
    for key in REQUIRED:
        if "$" in done.settings.get(key, ""):
            settings.append(f"{key}=given")
    return from_composed(compose_tree(prepare_overrides(settings, PPO), PPO), [], PPO)
