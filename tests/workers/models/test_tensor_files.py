"""Files of tensors are those that safetensors itself would write."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from workers.models.tensor_files import write_model_file


def test_a_model_file_equals_that_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "b.weight": torch.randn(3, 5),
        "a.weight": torch.randn(3, 5).bfloat16(),
        "a.bias": torch.randn(4),
        "counts": torch.arange(3),
        "scalar": torch.tensor(1.5),
        "mask": torch.tensor([True, False]),
    }
    write_model_file(tensors, tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
