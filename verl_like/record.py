"""Write a record of training steps that `verl-like bisect` compares; needs only numpy.

    recorder = Recorder("records/a", framework="mine", config={"lr": 1e-3})
    for step in range(1, 11):
        ...
        samples = ragged(prompts, responses, scores=scores, rollout_log_probs=log_probs)
        recorder.step(step, samples, loss=0.5, lr=1e-3)

You may copy this file into another project. A record is a folder with one line of JSON per step in
`steps.jsonl`, after a line about the run, and one safetensors file `<step>.safetensors` per step.
`docs/my_curves_differ.md` describes the fields; each of them is optional.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
STEPS = "steps.jsonl"
CODES = {
    np.dtype(kind).str: code
    for code, kind in {
        **{"BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32},
        **{"I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64},
    }.items()
}
"""Numpy's name of a type -> the name in safetensors files."""
PACKAGES = {"torch", "transformers", "trl", "verl", "verl-like", "vllm", "numpy"}


class RecordError(ValueError):
    """A record that cannot be read or written; the message says where and why."""


class Recorder:
    """Writes one record; an existing record in the folder is continued."""

    def __init__(
        self, folder: str | os.PathLike[str], framework: str, config: Mapping[str, Any] = {}
    ) -> None:
        """`framework` names the program, such as "trl"; `config` has the settings of its run,
        nested or with dotted keys.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / STEPS).exists():
            installed = {d.name: d.version for d in distributions() if d.name in PACKAGES}
            versions = {"python": platform.python_version(), **installed}
            head = {"record": VERSION, "framework": framework, "versions": versions}
            self._append(head | {"config": flat(config)})

    def step(self, number: int, arrays: Mapping[str, Any] = {}, **numbers: Any) -> None:
        """Write the arrays and the numbers of a step.

        Args:
            number: number of the step.
            arrays: field -> array of numpy or torch, as `ragged` returns them.
            numbers: metrics of the step; a value may be a dict.
        """
        if arrays:
            contents = safetensors({name: as_array(value) for name, value in arrays.items()})
            draft = self.folder / f".{number}.draft"
            draft.write_bytes(contents)
            draft.replace(self.folder / f"{number}.safetensors")
        self._append({"step": number, **numbers})

    def _append(self, line: Mapping[str, Any]) -> None:
        with (self.folder / STEPS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the nested settings of `tree` with dotted keys, which begin with `prefix`."""
    keys: dict[str, Any] = {}
    for name, value in tree.items():
        inner = value if isinstance(value, Mapping) else {}
        keys |= flat(inner, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return keys


Rows = Sequence[Sequence[Any] | np.ndarray]


def ragged(prompts: Rows, responses: Rows, **fields: Any) -> dict[str, Any]:
    """Return the arrays of a step from rows of different lengths.

    Args:
        prompts: token ids of each row's prompt.
        responses: token ids of each row's response.
        fields: further arrays, with a number per row or a number per token of the response.
    """
    lengths = np.array([len(row) for row in responses])
    arrays = {"prompts": padded(prompts), "prompt_mask": padded([[True] * len(p) for p in prompts])}
    arrays |= {"responses": padded(responses), "response_lengths": lengths}
    arrays["response_mask"] = np.arange(arrays["responses"].shape[1]) < lengths[:, None]
    known = {name: values for name, values in fields.items() if values is not None}
    per_row = {name for name, values in known.items() if np.ndim(values[0]) == 0}
    return arrays | {n: np.asarray(x) if n in per_row else padded(x) for n, x in known.items()}


def padded(rows: Rows, width: int = 0, fill: float = 0) -> np.ndarray:
    """Return rows of different lengths as one array of at least `width`, padded with `fill`."""
    kinds = [np.asarray(row).dtype for row in rows if len(row)]
    shape = len(rows), max([width, *map(len, rows)])
    array = np.full(shape, fill, dtype=np.result_type(*kinds) if kinds else np.int64)
    for number, row in enumerate(rows):
        array[number, : len(row)] = row
    return array


def as_array(value: Any) -> np.ndarray:
    """Return an array or a torch tensor as a numpy array; bfloat16 becomes float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    array = np.ascontiguousarray(value)
    if array.dtype.str not in CODES:
        raise RecordError(f"an array of dtype {array.dtype}; use {', '.join(CODES.values())}.")
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
