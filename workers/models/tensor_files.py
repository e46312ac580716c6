"""Write safetensors files, immediately or in the background.

`workers.training.checkpoints.background_copies` writes in the background.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from verl_like.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in the safetensors format."""
LEAST_BYTES = 16 * 2**20
"""Smaller files are written directly, which is faster than a copy and a separate process."""
ALIGNMENT = 8
"""Alignment of the first byte after the header."""


class FileWriter:
    """Writes files immediately; a file is a header followed by the bytes of tensors.

    GPU tensors are copied to host memory one at a time.
    """

    def add(self, path: Path, header: bytes, tensors: Sequence[Tensor]) -> None:
        """Write a file, or in a subclass copy it to write it later; then the tensors may change."""
        with path.open("wb") as file:
            file.write(header)
            for tensor in tensors:
                file.write(byte_view(tensor).cpu().numpy().data)

    def rename(self, path: Path, name: Path) -> None:
        """Rename a file that was added."""
        path.replace(name)


WRITE_NOW = FileWriter()


def byte_view(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, on its device; without a copy if it is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def write_tensors(
    tensors: Mapping[str, Tensor],
    path: Path,
    metadata: Mapping[str, str],
    writer: FileWriter = WRITE_NOW,
) -> None:
    """Write a safetensors file with the tensors one after the other."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which a tensor file cannot store")
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }

    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    writer.add(path, struct.pack("<Q", len(text)) + text, list(tensors.values()))


def write_model_file(
    tensors: Mapping[str, Tensor], path: Path, writer: FileWriter = WRITE_NOW
) -> None:
    """Write weights for transformers and peft, ordered by descending item size, then by name."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    write_tensors({name: tensors[name] for name in ordered}, path, {"format": "pt"}, writer)
