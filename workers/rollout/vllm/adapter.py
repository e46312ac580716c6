"""Transfer a LoRA adapter to vLLM, which loads it in addition to its base model.

    files = AdapterFiles(model_config, model_path)
    with files.written(tensors) as folder: ...      # vLLM loads the adapter from there

vLLM reads adapters from folders in peft's format, so each sync writes such a folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from workers.models.lora import add_adapter, is_adapter, save_adapter
from workers.rollout.vllm.setup import meta_model
from workers.weights.checksum import checksum_of
from workers.weights.module_writer import ExpectedTensors

if TYPE_CHECKING:
    from workers.config import ModelConfig


class AdapterFiles:
    """Writes the adapters of one run to files."""

    def __init__(self, config: ModelConfig, model_path: str) -> None:
        self.config = config
        self.module = meta_model(model_path)
        add_adapter(self.module, config)
        named = self.module.named_parameters()
        self.shapes = {name: tensor.shape for name, tensor in named if is_adapter(name)}
        self.num_elements = sum(shape.numel() for shape in self.shapes.values())
        self.checksum = "no adapter has arrived"

    @contextmanager
    def written(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Path]:
        """Context in which the adapter is in a folder; `tensors` have the actor's names.

        Raise a `WeightSyncError` if tensors are missing or do not fit.
        """
        arrived = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
        expected = ExpectedTensors(self.shapes)
        for name, tensor in arrived.items():
            expected.fits(name, tensor)
        expected.verify("adapter")
        self.checksum = checksum_of(arrived.items())
        with tempfile.TemporaryDirectory(prefix="verl-like-adapter-") as folder:
            save_adapter(Path(folder), self.module, self.config, arrived.items())
            yield Path(folder)
