"""Parse `key=value` settings with Hydra, reject unknown keys, and write keywords as settings.

Example:

    settings = flat_settings(PPOConfig, {"data": {"train_batch_size": 8}, "algorithm": "grpo"})
    overrides_of(settings)          # ["data.train_batch_size=8", "algorithm=grpo"]
    parse("data.train_batch_size=8").value()        # 8
    reject_unknown(["data.batch_size"], PPO, files={})      # a ConfigError
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from trainer.config.keys import config_keys, key_of_own_name, keys_by_name, named_keys
from trainer.config.schema import Recipe
from verl_like.errors import ConfigError, nearest

PLAIN_TEXT = re.compile(r"[A-Za-z_/][\w./@-]*", re.ASCII)
"""Texts that the parser reads without quotes, unless they are `WORDS`."""
WORDS = {"true", "false", "null", "inf", "nan"}


@lru_cache(maxsize=4096)
def parse(setting: str) -> Override:
    """Parse a setting into its `key_or_group` and `value()`."""
    try:
        (parsed,) = OverridesParser.create().parse_overrides([setting])
    except HydraException as err:
        name, equals, _ = setting.partition("=")
        if not equals:
            raise ConfigError(
                f"{setting} is not a setting. Settings are written key=value, as in trainer.seed=2."
            ) from err
        raise ConfigError(
            f"{setting} cannot be read as a setting. Quote a text that has characters other than "
            "letters, digits and /-\\+.$%*@?|, inside the quotes of the shell: "
            f"\"{name}='...'\". A list is [1, 2], a dict {{name: 1}}."
        ) from err
    return parsed


def keys_of(settings: Iterable[Override]) -> list[str]:
    """Return the dotted keys that are set, added or deleted, even inside `section={key: value}`."""
    return [key for setting in settings for key in keys_in(setting.key_or_group, setting.value())]


def keys_set(settings: Iterable[Override]) -> list[str]:
    """Return the dotted keys that these settings set; a `~key` undoes earlier ones of that key."""
    keys: dict[str, None] = {}
    for setting in settings:
        if setting.is_delete():
            keys = {key: None for key in keys if key != setting.key_or_group}
        else:
            keys |= dict.fromkeys(keys_of([setting]))
    return list(keys)


def keys_in(key: str, value: Any) -> list[str]:
    """Return the dotted keys of nested dicts below `key`."""
    if not isinstance(value, dict) or not value:
        return [key]
    below = {f"{key}.{name}" if key else str(name): inner for name, inner in value.items()}
    return [dotted for name, inner in below.items() for dotted in keys_in(name, inner)]


def sweep_jobs(settings: Sequence[str]) -> list[list[str]]:
    """Return the settings of each job of a sweep: all combinations of choices like `seed=1,2`."""
    choices = []
    for setting in settings:
        parsed = parse(setting)
        if parsed.is_discrete_sweep():
            values = parsed.sweep_string_iterator()
            choices.append([f"{parsed.get_key_element()}={value}" for value in values])
        else:
            choices.append([setting])
    return [list(job) for job in itertools.product(*choices)]


def flat_settings(schema: type, keywords: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten keywords to dotted keys: a section's dict is expanded, any other dict is a value.

    A keyword may be dotted: `**{"optim.lr": 1e-5}`. `prefix` is the place of the keywords in the
    configuration: "", or a section's name and a dot.
    """
    known, settings = keys_by_name(schema), dict[str, Any]()
    for name, value in keywords.items():
        below = {f"{prefix}{name}": value}
        section = known.get(f"{prefix}{name}")
        if section is not None and section.is_section and isinstance(value, Mapping):
            below = flat_settings(schema, value, f"{section.name}.")
        for key, inner in below.items():
            if key in settings:
                raise ConfigError(
                    f"{key} is set twice: {settings[key]!r} and {inner!r}. Set it once."
                )
            settings[key] = inner
    return settings


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as `key=value` strings."""
    return [f"{key}={as_text(value, key)}" for key, value in settings.items()]


def as_text(value: Any, key: str) -> str:
    """Return a value in the parser's syntax; raise if the command line cannot express it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        text = str(value)
        if PLAIN_TEXT.fullmatch(text) and text.lower() not in WORDS:
            return text
        return QuotedString(text, Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {as_text(v, key)}' for name, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_text(item, key) for item in value)}]"
    if isinstance(value, type | FunctionType):
        if value.__module__ == "__main__" or "." in value.__qualname__:
            raise ConfigError(
                f"{key}={value.__qualname__}: worker processes import it by its name, so define it "
                "at the top level of a module, such as my_algorithm.py, and import it from there."
            )
        return f"{value.__module__}.{value.__qualname__}"
    raise ConfigError(
        f"{key}={value!r}: an object of type {type(value).__name__} cannot be the value of a "
        "key; values are numbers, texts, true, false, null, functions and classes of modules, "
        "and lists and dicts of these."
    )


def reject_unknown(names: Iterable[str], recipe: Recipe[Any], files: Mapping[str, Path]) -> None:
    """Reject unknown keys, all in one error, which names the user's `files` with such a word."""
    errors = []
    for name in names:
        text = unknown_key(name, recipe)
        if text:
            word = re.compile(rf"(?m)^[^#]*\b{re.escape(name.rpartition('.')[2])}['\"]?\s*:")
            places = [file for file, path in files.items() if word.search(path.read_text())]
            errors.append((f"In {' or '.join(map(repr, places))}: " if places else "") + text)
    if errors:
        apart = " " if len(errors) == 1 else "\n"
        raise ConfigError(apart.join([*errors, f"All keys: verl-like {recipe.name} --cfg all"]))


def unknown_key(name: str, recipe: Recipe[Any]) -> str:
    """Return the error for an unknown key of a setting, or ""."""
    known = named_keys(recipe.schema)
    above = known.get(name.rpartition(".")[0])
    if name in known or name in recipe.groups or (above and above.rules.arguments_of):
        return ""  # arguments are checked by the signature of their function
    section = key_of_own_name(name, recipe.schema)
    if section is None:
        from trainer.config.key_errors import no_such_key

        return no_such_key(name, recipe)
    if section.rules.options is not None:
        options = [key.name for key in config_keys(section.rules.options)]
        names = [f"{section.name}.{option}" for option in options]
        return f"there is no key {name!r}.{nearest(name, names)} {_has(section.name, options)}"
    if section.item_schema is None:
        return ""

    own_name, _, rest = name.removeprefix(f"{section.name}.").partition(".")
    items = [key.name for key in config_keys(section.item_schema)]
    if not rest or rest.partition(".")[0] in items:
        return ""
    has = _has(f"{section.name}.{own_name}", items)
    return f"there is no key {name!r}.{nearest(rest, items)} {has}"


def _has(section: str, names: Sequence[str]) -> str:
    return f"{section} has {', '.join(names)}."
