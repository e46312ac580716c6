"""Mask secrets in the configuration, logs and errors that a run writes.

    masked({"env_vars": {"HF_TOKEN": "hf_abc..."}})     # {"env_vars": {"HF_TOKEN": "***"}}
    mask_text("refused: hf_abc...")                      # "refused: ***"

A value in the configuration or the environment is a secret if its name looks like one, and so is a
password in a URL. `mask_text` knows the secrets of this process's environment and those that
`masked` has seen: in the driver a run's configuration, in a worker the arguments of its roles.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableSet
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

MASK = "***"
SHORTEST = 8
"""Minimum length of a secret that is masked in text; shorter ones may be ordinary words."""
SHORTEST_NAMED = 4
"""Minimum length of a value that `mask_text` replaces by the name of its variable."""
_SECRET_NAME = re.compile(
    r"(^|[^a-z])(secret|password|passwd|credentials?|(api|access|private|secret)_?key)$"
    r"|(^|_)(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!stop_)(?<!mask_)token$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)([^/@\s:]*):([^/@\s]+)(?=@)")
"""User and password before a host."""
_by_name: dict[str, str] = {}
"""Value -> name of the environment variables that `mask_with_name` was given."""


def is_secret_name(name: str) -> bool:
    """Return whether a name marks a secret: HF_TOKEN, api-key, db.password."""
    return bool(_SECRET_NAME.search(name.replace("-", "_")))


def masked(tree: Any) -> Any:
    """Return a copy of the tree with secrets masked, dataclasses as dicts and tuples as lists."""
    if isinstance(tree, str):
        return _without_passwords(tree)
    if isinstance(tree, Mapping):
        return {name: _masked_value(str(name), value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked(value) for value in tree]
    if is_dataclass(tree) and not isinstance(tree, type):
        return masked({field.name: getattr(tree, field.name) for field in fields(tree)})
    return tree


def add_secrets(tree: Any) -> None:
    """Add the secrets in a tree to those that `mask_text` masks."""
    masked(tree)


def _masked_value(name: str, value: Any) -> Any:
    if not (isinstance(value, str) and value and is_secret_name(name)):
        return masked(value)
    if value != MASK:
        _known().add(value)
    return MASK


def mask_with_name(value: str, name: str) -> None:
    """Make `mask_text` show `name` instead of the value of an environment variable.

    Values under `SHORTEST_NAMED` characters stay, because they may be ordinary words.
    """
    if len(value) >= SHORTEST_NAMED:
        _by_name[value] = name


def mask_text(text: str) -> str:
    """Return the text, with all secrets that this process knows replaced."""
    for value, name in _by_name.items():
        text = text.replace(value, name)
    for secret in sorted(_known(), key=len, reverse=True):
        if len(secret) >= SHORTEST and secret in text:
            text = text.replace(secret, MASK)
    return _without_passwords(text)


def _without_passwords(text: str) -> str:
    return _IN_URL.sub(rf"\1:{MASK}", text) if "://" in text else text


@cache
def _known() -> MutableSet[str]:
    """Return the secrets that this process knows, at first those of its environment."""
    return {value for name, value in os.environ.items() if value and is_secret_name(name)}
