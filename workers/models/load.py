"""Weights from a Hugging Face folder into a module that has none, one tensor at a time.

Each rank of a sharded module reads its own slices. Names that the module and the folder spell
differently are left to transformers, which reads the whole model on each rank.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_like.errors import ConfigError
from workers.models.causal_lm import Head, ScalarHeadModel, empty_model
from workers.models.folder import model_folder
from workers.models.lora import initial_value, is_adapter

if TYPE_CHECKING:
    from workers.config import ModelConfig

logger = logging.getLogger(__name__)


def load_model(config: ModelConfig, head: Head, device: torch.device | None = None) -> Any:
    """The whole module on one device, in evaluation mode."""
    device = device or torch.device("cpu")
    module = empty_model(config, head, device)
    load_weights(module, config, head, device)
    return module


def load_weights(
    module: Any, config: ModelConfig, head: Head, device: torch.device, shard: int = 0
) -> None:
    """Give every parameter its memory on `device` and its values.

    `shard` is this rank's place on the mesh's shard axis.
    """
    materialize(module, device)
    source = Folder(model_folder(config.path), module.base_model_prefix)
    new_head = "score." if isinstance(module, ScalarHeadModel) and head == "scalar" else None
    missing, unfit = [], []
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            origin = name.replace(".base_layer.", ".")
            if is_adapter(name):
                _copy(parameter, initial_value(name, parameter.shape), shard)
            elif new_head is not None and name.startswith(new_head):
                parameter.zero_()
            elif (stored := source.find(origin)) is None:
                missing.append(name)
            elif (there := list(stored.get_shape())) != (here := list(parameter.shape)):
                unfit.append(f"{origin} (is {there}, config.json says {here})")
            else:
                _copy(parameter, stored, shard)

    if head == "score" and any(name.startswith("score.") for name in missing):
        raise ConfigError(
            f"model.path={config.path!r} has no score.weight of [1, hidden]: it is no reward "
            "model with one output (a sequence classifier with num_labels=1)."
        )
    if unfit:
        raise ConfigError(
            f"model.path={config.path!r}: weights do not fit: {', '.join(unfit[:20])}."
        )
    if missing:
        _load_through_transformers(module, config, missing, shard)


def materialize(module: Any, device: torch.device) -> None:
    """Memory for the parameters, uninitialized; buffers keep values, tied parameters stay tied."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    buffers = []
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((child, name))
        for name, buffer in child._buffers.items():
            if buffer is not None:
                buffers.append((child, name, buffer))

    module.to_empty(device=device)
    for (first, first_name), *others in owners.values():
        for child, name in others:
            child._parameters[name] = first._parameters[first_name]
    for child, name, buffer in buffers:
        child._buffers[name] = buffer.to(device)


class Folder:
    """The safetensors of a Hugging Face folder, by tensor name; only slices asked for are read."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.path = path
        self.prefix = prefix + "."
        self.opened: dict[str, Any] = {}
        index = path / "model.safetensors.index.json"
        self.files: dict[str, str] = {}
        if index.is_file():
            self.files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif (path / "model.safetensors").is_file():
            self.files = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")

    def find(self, name: str) -> Any:
        """The slice of a tensor, with or without the base model's prefix in its name, or None."""
        for spelled in (name, name.removeprefix(self.prefix), self.prefix + name):
            if spelled in self.files:
                return self._open(self.files[spelled]).get_slice(spelled)
        return None

    def _open(self, file: str) -> Any:
        if file not in self.opened:
            try:
                self.opened[file] = safe_open(self.path / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"model.path: {self.path / file} cannot be read: {error}"
                ) from error
        return self.opened[file]


def _copy(parameter: Tensor, stored: Any, shard: int) -> None:
    """This rank's rows of a stored tensor (or slice of a file) into its part of the parameter."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(stored[:] if parameter.dim() else stored[...])
        return
    local = parameter.to_local()
    per_shard = -(-parameter.shape[0] // parameter.device_mesh["shard"].size())
    start = min(shard * per_shard, parameter.shape[0])
    if len(local):
        local.copy_(stored[start : start + len(local)])


def _load_through_transformers(
    module: Any, config: ModelConfig, missing: list[str], shard: int
) -> None:
    """For folders that only transformers can read: the whole model in host memory, then slices."""
    from transformers import AutoModelForCausalLM

    logger.warning(
        "model.path=%s: no safetensors of %s; transformers reads the folder, which takes the "
        "whole model's memory on each rank while it loads.",
        config.path,
        ", ".join(missing[:3]),
    )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_folder(config.path),
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"model.path={config.path!r} does not load as a causal LM: {error}"
        ) from error

    whole, report = loaded
    absent = sorted(set(missing) & set(report["missing_keys"]))
    if absent:
        raise ConfigError(
            f"model.path={config.path!r} lacks {len(absent)} weights: {', '.join(absent[:20])}."
        )
    values = whole.state_dict()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in missing:
                _copy(parameter, values[name.replace(".base_layer.", ".")], shard)
