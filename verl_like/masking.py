"""Secrets kept out of what a run writes: its configuration, its logs, its errors.

    masked({"env_vars": {"HF_TOKEN": "hf_abc..."}})     # {"env_vars": {"HF_TOKEN": "***"}}
    mask_text("refused: hf_abc...")                      # "refused: ***"

A value is a secret by the name that it stands under, in the configuration or in the environment.
`mask_text` knows those of this process's environment, and those that `masked` has seen: a run's
configuration in the driver, the arguments of its roles in a worker.
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
"""Characters of a secret that is looked for in text: shorter ones may be any word."""
SHORTEST_NAMED = 4
"""Characters of a variable's value whose name is shown in messages."""
_SECRET_NAME = re.compile(
    r"(^|[^a-z])(secret|password|passwd|credentials?|(api|access|private|secret)_?key)$"
    r"|(^|_)(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!stop_)(?<!mask_)token$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)([^/@\s:]*):([^/@\s]+)(?=@)")
"""User and password ahead of a host."""


def is_secret_name(name: str) -> bool:
    """Whether what has this name is not to be shown: HF_TOKEN, api-key, db.password."""
    return bool(_SECRET_NAME.search(name.replace("-", "_")))


def masked(tree: Any) -> Any:
    """A copy of the tree with secrets masked; dataclasses become dicts, tuples become lists."""
    if isinstance(tree, str):
        return _without_passwords(tree)
    if isinstance(tree, Mapping):
        return {name: _masked_value(str(name), value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [masked(value) for value in tree]
    if is_dataclass(tree) and not isinstance(tree, type):
        return masked({field.name: getattr(tree, field.name) for field in fields(tree)})
    return tree


def learn_secrets(tree: Any) -> None:
    """Know those that stand in it: `mask_text` masks them from now on."""
    masked(tree)


def _masked_value(name: str, value: Any) -> Any:
    if not (isinstance(value, str) and value and is_secret_name(name)):
        return masked(value)
    if value != MASK:
        _known().add(value)
    return MASK


def show_by_name(value: str, name: str) -> None:
    """Have `mask_text` write the name in the place of this value: a configuration read it."""
    if len(value) >= SHORTEST_NAMED:
        _by_name()[value] = name


@cache
def _by_name() -> dict[str, str]:
    return {}


def mask_text(text: str) -> str:
    """The text without the secrets that are known in this process."""
    for value, name in _by_name().items():
        text = text.replace(value, name)
    for secret in sorted(_known(), key=len, reverse=True):
        if len(secret) >= SHORTEST and secret in text:
            text = text.replace(secret, MASK)
    return _without_passwords(text)


def _without_passwords(text: str) -> str:
    return _IN_URL.sub(rf"\1:{MASK}", text) if "://" in text else text


@cache
def _known() -> MutableSet[str]:
    """The secrets of this process."""
    return {value for name, value in os.environ.items() if value and is_secret_name(name)}
