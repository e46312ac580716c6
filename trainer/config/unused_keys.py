"""Keys that the user set and that nothing reads in this run: an error, or at least a notice.

When a key is read stands at its field (`read_when`); a condition of a section covers all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from trainer.config.keys import Key, config_keys, path_to, read
from trainer.config.schema import RunConfig
from verl_like.errors import ConfigError


def check_unused(
    config: RunConfig, keys: Iterable[str], only_noticed: Collection[str] = ()
) -> list[str]:
    """Refuse those of the user's `keys` that nothing reads; for `only_noticed` return a notice."""
    notices = []
    for key in keys:
        reason = why_unused(config, key)
        if reason is None:
            continue

        if key not in only_noticed:
            raise ConfigError(
                f"{key} is set, but nothing reads it in this run: {reason}. Drop it, or change "
                "that."
            )
        notices.append(f"notice: {key} has no effect here: {reason}")
    return notices


def why_unused(config: RunConfig, name: str) -> str | None:
    """What is missing for the key `name` to be read; None if it is read."""
    for key in path_to(type(config), name):
        reason = _missing_for(config, key)
        if reason is not None:
            return reason
    return None


def unused_keys(config: RunConfig) -> dict[str, list[str]]:
    """Reason -> the keys and whole sections that nothing reads for it."""
    found: dict[str, list[str]] = {}
    unused_sections: tuple[str, ...] = ()

    for key in config_keys(type(config)):
        if key.name.startswith(unused_sections):
            continue
        reason = _missing_for(config, key)
        if reason is None:
            continue

        found.setdefault(reason, []).append(key.name)
        if key.is_section:
            unused_sections += (f"{key.name}.",)
    return found


def _missing_for(config: RunConfig, key: Key) -> str | None:
    section = read(config, key.name.rpartition(".")[0])
    for condition in key.rules.read_when:
        if not condition.holds(section, config):
            return condition.otherwise
    return None
