"""A batch as one safetensors file that can be loaded from anybody: no pickle, nothing in it is ever
run.

Tensors are stored as they are, numeric and text arrays as bytes, and one JSON document (itself a
column of bytes) holds object columns, `meta_info` and the order of everything. JSON's own types
survive as they are; tuples and numpy scalars are tagged; any other object is refused when saving.
`DataProto.save_to_disk` and `load_from_disk` call this.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from verl_like.batch.columns import Array, object_rows, tensors_of
from verl_like.batch.tensordicts import TensorDict
from verl_like.errors import BatchError

T = TypeVar("T")

_FORMAT = {"format": "verl_like.DataProto", "version": "1"}
_DOCUMENT = "document"
_TAG = "!"
_DAMAGE = (
    SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
_MAX_DEPTH = 100  # of containers in containers: JSON and its reader recurse
_BYTES_KINDS = "biufcSUmM"  # numpy dtypes that are nothing but bytes
_SCALARS: dict[str, type[np.generic]] = {
    kind.__name__: kind
    for kind in (np.bool_, np.str_, np.float16, np.float32, np.float64)
    + (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
}


class _RefusedError(Exception):
    """An object inside a row that JSON cannot hold; the message says what it is."""


def save(
    path: str | os.PathLike[str],
    batch: TensorDict | None,
    arrays: dict[str, Array],
    meta: dict[str, Any],
) -> None:
    """Write the parts of a batch to one file; the file appears complete or not at all."""
    target = Path(path)
    stored: dict[str, torch.Tensor] = {}
    for name, column in tensors_of(batch).items():
        stored[f"tensor:{name}"] = (
            column.detach().cpu().clone(memory_format=torch.contiguous_format)
        )
    specs: list[dict[str, Any]] = []
    for name, array in arrays.items():
        spec: dict[str, Any] = {"name": name, "shape": list(array.shape), "dtype": array.dtype.str}
        if array.dtype == object:
            spec["rows"] = _encode_rows(array.reshape(-1), name, max(1, math.prod(array.shape[1:])))
        elif array.dtype.kind in _BYTES_KINDS:
            stored[f"array:{name}"] = torch.frombuffer(
                bytearray(array.tobytes()) or bytearray(1), dtype=torch.uint8
            )
        else:
            raise BatchError(
                f"Column {name!r} has dtype {array.dtype}, which a batch file cannot hold."
            )
        specs.append(spec)
    document = {
        "rows": None if batch is None else int(batch.batch_size[0]),
        "tensors": list(tensors_of(batch)),
        "arrays": specs,
        "meta_info": _encode_meta(meta),
    }
    stored[_DOCUMENT] = torch.frombuffer(
        bytearray(json.dumps(document).encode()), dtype=torch.uint8
    )
    _write(target, stored)


def _write(target: Path, stored: dict[str, torch.Tensor]) -> None:
    """Write beside the target, then rename over it."""
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        content = safetensors.torch.save(stored, metadata=_FORMAT)
        with open(
            draft, "xb"
        ) as file:  # safetensors' own writer makes files that only their owner can read
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except (KeyError, SafetensorError) as error:
        kinds = {
            name.removeprefix("tensor:"): str(c.dtype)
            for name, c in stored.items()
            if name.startswith("tensor:")
        }
        raise BatchError(
            f"safetensors cannot hold the dtype of one of the columns {kinds}: {error}"
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def load(
    path: str | os.PathLike[str],
    build: Callable[[TensorDict | None, dict[str, Array], dict[str, Any]], T],
) -> T:
    """Read what `save` wrote and build a batch of its parts; anything else is a `BatchError`."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"No batch file at {os.fspath(path)!r}.")
    try:
        with safe_open(path, framework="pt") as stored:
            if stored.metadata() != _FORMAT:
                raise BatchError(f"its header is {stored.metadata()}, not {_FORMAT}")
            document = json.loads(stored.get_tensor(_DOCUMENT).numpy().tobytes())
            return build(*_read(document, stored))
    except _DAMAGE as error:
        raise BatchError(
            f"{os.fspath(path)!r} is not a batch file, or is damaged: {error}"
        ) from error


def _read(
    document: dict[str, Any], stored: Any
) -> tuple[TensorDict | None, dict[str, Array], dict[str, Any]]:
    """The parts of a batch out of the JSON document and the open file."""
    batch = None
    rows = document["rows"]
    if rows is not None:
        if type(rows) is not int or rows < 0:
            raise BatchError(f"its number of rows is {rows!r}")
        columns = {name: stored.get_tensor(f"tensor:{name}") for name in document["tensors"]}
        if any(not column.dim() or len(column) != rows for column in columns.values()):
            raise BatchError(f"its tensors do not all have {rows} rows")
        batch = TensorDict(columns, batch_size=[rows])
    arrays: dict[str, Array] = {}
    for spec in document["arrays"]:
        shape = [int(size) for size in spec["shape"]]
        dtype = np.dtype(str(spec["dtype"]))
        if min(shape) < 0:
            raise BatchError(f"column {spec['name']!r} has shape {shape}")
        if dtype.kind == "O":
            arrays[spec["name"]] = object_rows(_decode(row) for row in spec["rows"]).reshape(shape)
        elif dtype.kind in _BYTES_KINDS:
            content = stored.get_tensor(f"array:{spec['name']}").numpy().tobytes()
            size = math.prod(shape)
            arrays[spec["name"]] = (
                np.frombuffer(content, dtype=dtype, count=size).reshape(shape).copy()
            )
        else:
            raise BatchError(f"column {spec['name']!r} has dtype {dtype}")
    meta = {str(key): _decode(value) for key, value in document["meta_info"].items()}
    return batch, arrays, meta


def _encode_rows(rows: Iterable[Any], name: str, per_row: int) -> list[Any]:
    """Every object of a column; a refusal names column and row (`per_row` objects make one row)."""
    encoded = []
    for place, value in enumerate(rows):
        try:
            encoded.append(_encode(value))
        except _RefusedError as error:
            raise BatchError(
                f"Column {name!r}, row {place // per_row}: JSON cannot hold {error}. Convert or "
                "pop() the column first."
            ) from error
    return encoded


def _encode_meta(meta: dict[str, Any]) -> dict[str, Any]:
    """Every entry of `meta_info`; a refusal names the key."""
    encoded = {}
    for key, value in meta.items():
        try:
            if type(key) is not str:
                raise _RefusedError(f"the key {key!r} of type {type(key).__name__}")
            encoded[key] = _encode(value)
        except _RefusedError as error:
            raise BatchError(
                f"meta_info[{key!r}]: JSON cannot hold {error}. Convert or pop() it first."
            ) from error
    return encoded


def _encode(value: Any, depth: int = 0) -> Any:
    """A value in JSON's types. Exact types only: a subclass would come back as its base."""
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise _RefusedError(f"containers nested more than {_MAX_DEPTH} deep")
    if value is None or kind in (bool, float, str):
        return value
    if kind is int and value.bit_length() <= 4096:  # Python refuses to read longer ones from text
        return value
    if kind is list:
        return [_encode(entry, depth + 1) for entry in value]
    if kind is tuple:
        return {_TAG: "tuple", "value": [_encode(entry, depth + 1) for entry in value]}
    if kind is dict and all(type(key) is str for key in value):
        plain = {key: _encode(entry, depth + 1) for key, entry in value.items()}
        return {_TAG: "dict", "value": plain} if _TAG in plain else plain
    if kind in _SCALARS.values():
        return {_TAG: kind.__name__, "value": value.item()}
    raise _RefusedError(
        f"a {kind.__name__}" + (" with keys that are not strings" if kind is dict else "")
    )


def _decode(value: Any) -> Any:
    """The inverse of `_encode`."""
    if isinstance(value, list):
        return [_decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(entry) for key, entry in value.items()}
    tag, inner = value[_TAG], value["value"]
    if tag == "tuple":
        return tuple(_decode(entry) for entry in inner)
    if tag == "dict":
        return {key: _decode(entry) for key, entry in inner.items()}
    return _SCALARS[tag](inner)
