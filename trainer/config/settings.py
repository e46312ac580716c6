"""Keywords of a call as `key=value` settings, as they stand on the command line.

settings = flat_settings(PPOConfig, {"data": {"train_batch_size": 8}, "algorithm": "grpo"})
overrides_of(settings)          # ["data.train_batch_size=8", "algorithm=grpo"]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.keys import config_keys
from verl_like.errors import ConfigError

PLAIN_TEXT = re.compile(r"[A-Za-z_/][\w./@-]*", re.ASCII)
"""Texts that Hydra reads as they are, unless they are `WORDS`."""
WORDS = {"true", "false", "null", "inf", "nan"}


def flat_settings(schema: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value; the dict of a section holds keys, any other dict is a value.

    A name may be dotted itself: `**{"optim.lr": 1e-5}`.
    """
    sections = {key.name for key in config_keys(schema) if key.is_section}
    settings: dict[str, Any] = {}
    _flatten(sections, "", keywords, settings)
    return settings


def _flatten(
    sections: set[str], prefix: str, keywords: Mapping[str, Any], settings: dict[str, Any]
) -> None:
    for name, value in keywords.items():
        key = f"{prefix}{name}"
        if key in sections and isinstance(value, Mapping):
            _flatten(sections, f"{key}.", value, settings)
        elif key in settings:
            raise ConfigError(f"{key} is given twice: {settings[key]!r} and {value!r}. Drop one.")
        else:
            settings[key] = value


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """`key=value` strings."""
    return [f"{key}={as_text(value, key)}" for key, value in settings.items()]


def as_text(value: Any, key: str) -> str:
    """A value as Hydra reads it; what the command line has no form for is refused."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return _quoted(str(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {as_text(v, key)}' for name, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_text(item, key) for item in value)}]"
    raise ConfigError(
        f"{key}={value!r}: a {type(value).__name__} is no value of a key; those are numbers, "
        "texts, true, false, null, lists and dicts of them."
    )


def _quoted(text: str) -> str:
    """In quotes, where Hydra would read something else; it takes a backslash before them away."""
    if PLAIN_TEXT.fullmatch(text) and text.lower() not in WORDS:
        return text
    doubled = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{doubled}'"
