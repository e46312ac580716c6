"""A batch as one safetensors file that can be loaded from anybody: nothing in it is ever run.

Tensors are stored as they are, numeric and text arrays as bytes. One JSON document, itself a tensor
of bytes, holds object columns, `meta_info` and the order of everything.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from verl_like.batch.columns import Array, object_rows, tensors_of
from verl_like.batch.json_values import RefusedError, decode, encode
from verl_like.batch.tensordict_import import TensorDict
from verl_like.errors import BatchError

T = TypeVar("T")

_FORMAT = {"format": "verl_like.DataProto", "version": "1"}
_DOCUMENT = "document"
_BYTES_KINDS = "biufcSUmM"
"""Kinds of numpy dtypes that are nothing but bytes."""

_DAMAGE = (
    SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
"""What reading a file that is not ours, or is cut or changed, may raise."""


def save(
    path: str | os.PathLike[str],
    batch: TensorDict | None,
    arrays: dict[str, Array],
    meta: dict[str, Any],
) -> None:
    """Write the parts of a batch to one file; the file appears complete or not at all."""
    stored: dict[str, torch.Tensor] = {}
    for name, column in tensors_of(batch).items():
        copied = column.detach().cpu().clone(memory_format=torch.contiguous_format)
        stored[f"tensor:{name}"] = copied

    specs: list[dict[str, Any]] = []
    for name, array in arrays.items():
        spec: dict[str, Any] = {"name": name, "shape": list(array.shape), "dtype": array.dtype.str}
        if array.dtype == object:
            spec["rows"] = _encode_rows(name, array)
        elif array.dtype.kind in _BYTES_KINDS:
            # safetensors has no empty tensor of bytes to read from: one byte stands in for none
            stored[f"array:{name}"] = _bytes_tensor(array.tobytes() or bytes(1))
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
    stored[_DOCUMENT] = _bytes_tensor(json.dumps(document).encode())
    _write(Path(path), stored)


def _bytes_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _write(target: Path, stored: dict[str, torch.Tensor]) -> None:
    """Write beside the target, then rename over it."""
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        content = safetensors.torch.save(stored, metadata=_FORMAT)
        # not with safetensors' own writer: its files are readable by their owner alone
        with open(draft, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except (KeyError, SafetensorError) as error:
        kinds = {}
        for name, column in stored.items():
            if name.startswith("tensor:"):
                kinds[name.removeprefix("tensor:")] = str(column.dtype)
        raise BatchError(
            f"safetensors cannot hold the dtype of one of the columns {kinds}: {error}"
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def _encode_rows(name: str, array: Array) -> list[Any]:
    """Every object of a column; a refusal names column and row."""
    per_row = max(1, math.prod(array.shape[1:]))
    encoded = []
    for place, value in enumerate(array.reshape(-1)):
        try:
            encoded.append(encode(value))
        except RefusedError as error:
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
                raise RefusedError(f"the key {key!r} of type {type(key).__name__}")
            encoded[key] = encode(value)
        except RefusedError as error:
            raise BatchError(
                f"meta_info[{key!r}]: JSON cannot hold {error}. Convert or pop() it first."
            ) from error
    return encoded


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
            batch = _read_tensors(document, stored)
            arrays = {spec["name"]: _read_array(spec, stored) for spec in document["arrays"]}
            meta = {str(key): decode(value) for key, value in document["meta_info"].items()}
            return build(batch, arrays, meta)
    except _DAMAGE as error:
        raise BatchError(
            f"{os.fspath(path)!r} is not a batch file, or is damaged: {error}"
        ) from error


def _read_tensors(document: dict[str, Any], stored: Any) -> TensorDict | None:
    """The TensorDict of an open file."""
    rows = document["rows"]
    if rows is None:
        return None
    if type(rows) is not int or rows < 0:
        raise BatchError(f"its number of rows is {rows!r}")
    columns = {name: stored.get_tensor(f"tensor:{name}") for name in document["tensors"]}
    if any(not column.dim() or len(column) != rows for column in columns.values()):
        raise BatchError(f"its tensors do not all have {rows} rows")
    return TensorDict(columns, batch_size=[rows])


def _read_array(spec: dict[str, Any], stored: Any) -> Array:
    """A numpy column of an open file."""
    shape = [int(size) for size in spec["shape"]]
    dtype = np.dtype(str(spec["dtype"]))
    if min(shape) < 0:
        raise BatchError(f"column {spec['name']!r} has shape {shape}")
    if dtype.kind == "O":
        return object_rows(decode(row) for row in spec["rows"]).reshape(shape)
    if dtype.kind not in _BYTES_KINDS:
        raise BatchError(f"column {spec['name']!r} has dtype {dtype}")
    content = stored.get_tensor(f"array:{spec['name']}").numpy().tobytes()
    return np.frombuffer(content, dtype=dtype, count=math.prod(shape)).reshape(shape).copy()
