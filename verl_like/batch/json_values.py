"""Python objects as JSON that comes back as it was: exact types, nothing that is run on reading.

JSON's own types stand for themselves. Tuples, numpy scalars and dicts that hold the tag itself are
tagged: `{"!": "tuple", "value": [...]}`. Anything else is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_TAG = "!"
_MAX_DEPTH = 100  # of containers in containers: JSON and its reader recurse
_MAX_INT_BITS = 4096  # Python refuses to read longer integers from text
_SCALARS: dict[str, type[np.generic]] = {
    kind.__name__: kind
    for kind in (
        *(np.bool_, np.str_, np.float16, np.float32, np.float64),
        *(np.int8, np.int16, np.int32, np.int64),
        *(np.uint8, np.uint16, np.uint32, np.uint64),
    )
}


class RefusedError(Exception):
    """An object that JSON cannot hold; the message says what it is."""


def encode(value: Any, depth: int = 0) -> Any:
    """A value in JSON's types. Exact types only: a subclass would come back as its base."""
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise RefusedError(f"containers nested more than {_MAX_DEPTH} deep")
    if value is None or kind in (bool, float, str):
        return value
    if kind is int and value.bit_length() <= _MAX_INT_BITS:
        return value
    if kind is list:
        return [encode(entry, depth + 1) for entry in value]
    if kind is tuple:
        return {_TAG: "tuple", "value": [encode(entry, depth + 1) for entry in value]}
    if kind is dict and all(type(key) is str for key in value):
        plain = {key: encode(entry, depth + 1) for key, entry in value.items()}
        return {_TAG: "dict", "value": plain} if _TAG in plain else plain
    if kind in _SCALARS.values():
        return {_TAG: kind.__name__, "value": value.item()}
    reason = " with keys that are not strings" if kind is dict else ""
    raise RefusedError(f"a {kind.__name__}{reason}")


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(entry) for key, entry in value.items()}

    tag, inner = value[_TAG], value["value"]
    if tag == "tuple":
        return tuple(decode(entry) for entry in inner)
    if tag == "dict":
        return {key: decode(entry) for key, entry in inner.items()}
    return _SCALARS[tag](inner)
