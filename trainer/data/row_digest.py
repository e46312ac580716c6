"""A digest of rows in their order: a loader's place among them means nothing among others."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from verl_like.files import json_line

OTHER_ROWS = (
    "Give the data as it was, or train on this data in another trainer.default_local_dir, from the "
    "weights that `verl-like export` takes out of the checkpoint."
)
"""What to do about rows that are not those of the run so far."""


def digest_of_rows(rows: Iterable[Any]) -> str:
    """Of tokens, texts and numbers; of anything else that a row holds, its type alone counts."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        _add(row, digest)
    return digest.hexdigest()


def _add(value: Any, to: Any) -> None:
    if isinstance(value, np.ndarray):
        to.update(f"{value.dtype}{value.shape}".encode())
        to.update(np.ascontiguousarray(value).data)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _add(getattr(value, field.name), to)
    elif isinstance(value, tuple):
        for part in value:
            _add(part, to)
    else:
        to.update(json_line(value, lambda other: type(other).__name__).encode())
