"""The two formats of a batch: a pickle with out-of-band buffers, and one safetensors file.

Neither side of a pickle (protocol 5) copies a large contiguous CPU tensor. The receiver's memory
may therefore be shared with other processes; `DataProto.writable_copy` makes it private. A ragged
column travels as its values and spans.

The file is safe to load from anyone: nothing in it is executed. Tensors are stored as they are,
ragged columns as values, lengths and starts, numeric and text arrays as bytes. One JSON document,
stored as a tensor of bytes, holds object columns, `meta_info` and the order of all entries. JSON's
own types are stored as they are. Tuples, numpy's real numbers and strings, and dicts with the key
`!` are tagged: `{"!": "tuple", "value": [...]}`. Any other type is rejected.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from verl_like.batch.columns import Array, object_rows
from verl_like.batch.ragged import ColumnValues, RaggedTensor
from verl_like.errors import BatchError
from verl_like.files import write_atomic
from verl_like.tensor_ops import INTEGERS

SMALL_BYTES = 4096
"""Columns up to this size are copied into the pickle, because a view of a buffer takes longer."""

Packed = tuple[torch.dtype, tuple[int, ...], Any]
"""A tensor in a pickle: dtype, shape, and bytes."""

Columns = dict[str, Packed | tuple[Packed, Packed, Packed, int, float]]
"""Columns in a pickle; a ragged column is its values, lengths, starts, width and fill."""


def pack_columns(columns: Mapping[str, ColumnValues], protocol: int) -> Columns:
    """Return the columns in picklable form; from protocol 5 on, large bytes are buffers."""
    packed: Columns = {}
    spans: dict[int, Packed] = {}  # lengths that several columns share travel once
    for name, column in columns.items():
        if isinstance(column, RaggedTensor):
            for tensor in (column.lengths, column.starts):
                if id(tensor) not in spans:
                    spans[id(tensor)] = _pack(tensor, protocol)
            where = spans[id(column.lengths)], spans[id(column.starts)]
            packed[name] = _pack(column.values, protocol), *where, column.width, column.fill
        else:
            packed[name] = _pack(column, protocol)
    return packed


def unpack_columns(packed: Columns) -> dict[str, ColumnValues]:
    """Return the columns; large ones are views of the buffers that they arrived in."""
    columns: dict[str, ColumnValues] = {}
    for name, parts in packed.items():
        if len(parts) == 3:
            columns[name] = _tensor_over(*parts)
        else:
            values, lengths, starts, width, fill = parts
            spans = _tensor_over(*lengths), width, _tensor_over(*starts)
            columns[name] = RaggedTensor.from_checked(_tensor_over(*values), *spans, fill)
    return columns


def _pack(column: torch.Tensor, protocol: int) -> Packed:
    dtype, shape = column.dtype, tuple(column.shape)
    if not column.numel():
        return dtype, shape, b""
    bits = column.detach().cpu()
    if column.element_size() in INTEGERS:  # numpy does not have every dtype
        bits = bits.view(INTEGERS[column.element_size()])
    array = bits.numpy()
    if protocol < 5 or array.nbytes <= SMALL_BYTES:
        return dtype, shape, array.tobytes()
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return dtype, shape, pickle.PickleBuffer(flat)


def _tensor_over(dtype: torch.dtype, shape: tuple[int, ...], buffer: Any) -> torch.Tensor:
    """Return a tensor over a buffer, without a copy unless the copy is faster."""
    num_bytes = len(buffer if isinstance(buffer, bytes) else memoryview(buffer))
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    if num_bytes <= SMALL_BYTES:
        return torch.frombuffer(bytearray(buffer), dtype=dtype).reshape(shape)
    flat: NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)
    if not flat.flags.writeable:
        flat = np.asarray(_DeclaredWritable(flat))
    return torch.from_numpy(flat).view(dtype).view(shape)


class _DeclaredWritable:
    """The memory of a read-only array, declared writable.

    Torch has no read-only tensors and would warn for each array.
    """

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array  # keeps the memory alive as long as the new array lives
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


T = TypeVar("T")

_FORMAT = {"format": "verl_like.DataProto", "version": "1"}
_DOCUMENT = "document"
_BYTES_KINDS = "biufcSUmM"
"""Kinds of numpy dtypes that consist of plain bytes."""

_TAG = "!"
_MAX_DEPTH = 100  # of containers in containers: JSON and its reader recurse
_MAX_INT_BITS = 4096  # Python parses at most 4300 digits
_SCALARS: dict[str, type[np.generic]] = {
    kind.__name__: kind
    for kind in (
        *(np.bool_, np.str_, np.float16, np.float32, np.float64),
        *(np.int8, np.int16, np.int32, np.int64),
        *(np.uint8, np.uint16, np.uint32, np.uint64),
    )
}

_DAMAGE = (
    SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
"""Errors that a foreign, truncated or modified file may raise when it is read."""


def save(
    path: str | os.PathLike[str],
    rows: int | None,
    columns: Mapping[str, ColumnValues],
    arrays: dict[str, Array],
    meta: dict[str, Any],
) -> None:
    """Write the parts of a batch to one file, atomically.

    `rows` is None for a batch without a TensorDict.
    """
    stored: dict[str, torch.Tensor] = {}
    ragged: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, RaggedTensor):
            stored[f"tensor:{name}"] = _copied(column.values)
            stored[f"lengths:{name}"] = _copied(column.lengths)
            stored[f"starts:{name}"] = _copied(column.starts)
            ragged[name] = [column.width, column.fill]
        else:
            stored[f"tensor:{name}"] = _copied(column)

    specs: list[dict[str, Any]] = []
    for name, array in arrays.items():
        spec: dict[str, Any] = {"name": name, "shape": list(array.shape), "dtype": array.dtype.str}
        if array.dtype == object:
            per_row = max(1, math.prod(array.shape[1:]))
            spec["rows"] = [
                encode(value, f"column {name!r}, row {place // per_row}")
                for place, value in enumerate(array.reshape(-1))
            ]
        elif array.dtype.kind in _BYTES_KINDS:
            # safetensors cannot read an empty tensor of bytes, so one byte is written instead
            stored[f"array:{name}"] = _bytes_tensor(array.tobytes() or bytes(1))
        else:
            raise BatchError(
                f"column {name!r} has dtype {array.dtype}, which a batch file cannot store. "
                "Convert it to numbers, text or objects, or remove it with pop() first."
            )
        specs.append(spec)

    odd = [key for key in meta if type(key) is not str]
    if odd:
        raise BatchError(
            f"meta_info[{odd[0]!r}]: JSON keys must be strings. Remove the entry with pop() first."
        )
    document = {
        "rows": rows,
        "tensors": list(columns),
        "ragged": ragged,
        "arrays": specs,
        "meta_info": {key: encode(value, f"meta_info[{key!r}]") for key, value in meta.items()},
    }
    stored[_DOCUMENT] = _bytes_tensor(json.dumps(document).encode())
    _write(Path(path), stored)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _bytes_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _write(target: Path, stored: dict[str, torch.Tensor]) -> None:
    try:
        # not with safetensors' own writer: its files are readable only by their owner
        write_atomic(target, safetensors.torch.save(stored, metadata=_FORMAT))
    except (KeyError, SafetensorError) as error:
        kinds = {}
        for name, column in stored.items():
            if name.startswith("tensor:"):
                kinds[name.removeprefix("tensor:")] = str(column.dtype)
        raise BatchError(
            f"safetensors cannot hold the dtype of one of the columns {kinds}: {error}. "
            "Convert the column, or remove it with pop() first."
        ) from error


def load(
    path: str | os.PathLike[str],
    build: Callable[[int | None, dict[str, ColumnValues], dict[str, Array], dict[str, Any]], T],
) -> T:
    """Read a file of `save` and `build` a batch of its parts; reject any other file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no batch file at {os.fspath(path)!r}.")
    try:
        with safe_open(path, framework="pt") as stored:
            if stored.metadata() != _FORMAT:
                raise BatchError(f"its header is {stored.metadata()}, not {_FORMAT}")
            document = json.loads(stored.get_tensor(_DOCUMENT).numpy().tobytes())
            columns = _read_columns(document, stored)
            arrays = {spec["name"]: _read_array(spec, stored) for spec in document["arrays"]}
            meta = {str(key): decode(value) for key, value in document["meta_info"].items()}
            return build(document["rows"], columns, arrays, meta)
    except _DAMAGE as error:
        raise BatchError(
            f"{os.fspath(path)!r} is not a batch file, or is damaged: {error}. Pass a file of "
            "DataProto.save_to_disk."
        ) from error


def _read_columns(document: dict[str, Any], stored: Any) -> dict[str, ColumnValues]:
    """Return the tensor columns of an open file."""
    ragged = document.get("ragged", {})
    columns: dict[str, ColumnValues] = {}
    for name in document["tensors"]:
        column = stored.get_tensor(f"tensor:{name}")
        if name in ragged:
            width, fill = ragged[name]
            lengths, starts = (stored.get_tensor(f"{of}:{name}") for of in ("lengths", "starts"))
            column = RaggedTensor(column, lengths, int(width), starts, fill)
        columns[name] = column
    return columns


def _read_array(spec: dict[str, Any], stored: Any) -> Array:
    """Return a numpy column of an open file."""
    shape = [int(size) for size in spec["shape"]]
    dtype = np.dtype(str(spec["dtype"]))
    if min(shape) < 0:
        raise BatchError(f"column {spec['name']!r} has the invalid shape {shape}")
    if dtype.kind == "O":
        return object_rows(decode(row) for row in spec["rows"]).reshape(shape)
    if dtype.kind not in _BYTES_KINDS:
        raise BatchError(f"column {spec['name']!r} has the unsupported dtype {dtype}")
    content = stored.get_tensor(f"array:{spec['name']}").numpy().tobytes()
    return np.frombuffer(content, dtype=dtype, count=math.prod(shape)).reshape(shape).copy()


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """Return the value in JSON's types; errors call it `where`.

    A subclass of a known type is rejected, because it would come back as its base class.
    """
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int and value.bit_length() <= _MAX_INT_BITS:
        return value
    if kind in _SCALARS.values():
        return {_TAG: kind.__name__, "value": value.item()}

    is_deep = depth >= _MAX_DEPTH
    if kind in (list, tuple) and not is_deep:
        entries = [encode(entry, where, depth + 1) for entry in value]
        return entries if kind is list else {_TAG: "tuple", "value": entries}
    has_names = kind is dict and all(type(key) is str for key in value)
    if has_names and not is_deep:
        plain = {key: encode(entry, where, depth + 1) for key, entry in value.items()}
        return {_TAG: "dict", "value": plain} if _TAG in plain else plain

    reason = f" in {depth} others" if is_deep else ""
    reason = f" with more than {_MAX_INT_BITS} bits" if kind is int else reason
    reason = " with keys that are not strings" if kind is dict and not has_names else reason
    raise BatchError(
        f"{where}: a batch file cannot store a value of type {kind.__name__}{reason}. Convert the "
        "value, or remove it with pop()."
    )


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
