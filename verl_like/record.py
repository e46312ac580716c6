"""Write and read a record of training steps that `verl-like bisect` compares; needs only numpy.

    recorder = Recorder("records/a", framework="mine", config={"lr": 1e-3})
    for step in range(1, 11):
        ...
        recorder.step(step, {"responses": ids, "advantages": advantages}, loss=0.5, lr=1e-3)

You may copy this file into another project. A record is a folder with one line of JSON per step in
`steps.jsonl`, after a line about the run, and one safetensors file `<step>.safetensors` per step.
`docs/my_curves_differ.md` describes the fields; each of them is optional. Nothing in a record is
executed when it is read, and sizes are checked before memory is used.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
STEPS = "steps.jsonl"
MAX_FILE, MAX_LINE, MAX_STEPS = 4 << 30, 16 << 20, 1_000_000
"""Bytes of a step's file, characters of a line, lines of `steps.jsonl`."""
DTYPES = {
    **{"BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32},
    **{"I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64},
}
CODES = {np.dtype(kind).str: code for code, kind in DTYPES.items()}
PACKAGES = ("torch", "transformers", "trl", "verl", "verl-like", "vllm", "numpy")


class RecordError(ValueError):
    """A record that cannot be read or written; the message says where and why."""


class Recorder:
    """Writes one record; an existing record in the folder is continued."""

    def __init__(
        self, folder: str | os.PathLike[str], framework: str, config: Mapping[str, Any] = {}
    ) -> None:
        """`config` has the run's settings: JSON's types, nested or with dotted keys."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / STEPS).exists():
            versions = {"python": platform.python_version(), **installed(PACKAGES)}
            head = {"record": VERSION, "framework": framework, "versions": versions}
            self._append(head | {"config": flat(config)})

    def step(self, number: int, arrays: Mapping[str, Any] = {}, **numbers: Any) -> None:
        """Write a step: arrays (numpy's or torch's) by field, and numbers or dicts of numbers."""
        if arrays:
            contents = safetensors({name: as_array(value) for name, value in arrays.items()})
            draft = self.folder / f".{number}.draft"
            draft.write_bytes(contents)
            draft.replace(self.folder / f"{number}.safetensors")
        self._append({"step": number, **numbers})

    def _append(self, line: Mapping[str, Any]) -> None:
        with (self.folder / STEPS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys."""
    keys: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            keys |= flat(value, f"{prefix}{name}.")
        else:
            keys[f"{prefix}{name}"] = value
    return keys


def as_array(value: Any) -> np.ndarray:
    """Return an array or a torch tensor as a numpy array; bfloat16 becomes float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    array = np.ascontiguousarray(value)
    if array.dtype.str not in CODES:
        raise RecordError(f"an array of dtype {array.dtype}; a record takes {', '.join(DTYPES)}.")
    return array


def safetensors(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the contents of a safetensors file."""
    header, end = {}, 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        code, shape = CODES[array.dtype.str], list(array.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join(
        [len(text).to_bytes(8, "little"), text, *(a.tobytes() for a in arrays.values())]
    )


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file; raise for a file that is not one, or too large."""
    size = path.stat().st_size
    if size > MAX_FILE:
        raise RecordError(f"{path} has {size} bytes; at most {MAX_FILE} are read.")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        if length > min(size - 8, MAX_LINE):
            raise ValueError(f"its header has {length} bytes in a file of {size}")
        header, arrays = json.loads(data[8 : 8 + length]), {}
        header.pop("__metadata__", None)
        for name, spec in header.items():
            kind, (begin, end) = np.dtype(DTYPES[spec["dtype"]]), spec["data_offsets"]
            count = math.prod(spec["shape"])
            if not 0 <= begin <= end <= size - 8 - length or end - begin != count * kind.itemsize:
                raise ValueError(f"{name} claims bytes {begin} to {end} for {count} numbers")
            flat_array = np.frombuffer(data, kind, count, 8 + length + begin)
            arrays[name] = flat_array.reshape(spec["shape"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"{path} is not a safetensors file of a record: {error!r}.") from error
    return arrays


def read_steps(folder: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the line about the run, and the newest line of every step; raise for other files."""
    path, lines = folder / STEPS, list[dict[str, Any]]()
    with path.open(encoding="utf-8", errors="replace") as file:
        while text := file.readline(MAX_LINE + 1):
            try:
                line = json.loads(text) if len(text) <= MAX_LINE else None
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict) or len(lines) > MAX_STEPS:
                raise RecordError(f"{path}, line {len(lines) + 1}: not an object of a record.")
            lines.append(line)
    if not lines or lines[0].get("record") != VERSION:
        raise RecordError(f'{path}: its first line must have "record": {VERSION}.')
    steps = {line["step"]: line for line in lines if type(line.get("step")) is int}
    return lines[0], steps
