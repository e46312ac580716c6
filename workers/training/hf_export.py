"""A trained model as a Hugging Face folder that plain `from_pretrained` loads.

An actor becomes what it was loaded from: same configuration, tokenizer and type, new weights, LoRA
merged, under the names that `save_pretrained` writes; a buffer has the type that it has in the
module, such as a router's float32. A critic or a reward model becomes a sequence classifier with
one label: body under the body's names and head as `score.weight`, so that
`AutoModelForSequenceClassification`, or `AutoModel` for the body alone, loads it.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workers.models.causal_lm import ScalarHeadModel
from workers.models.checkpoint_format import checkpoint_format
from workers.models.folder import model_folder
from workers.models.state import persistent_buffers
from workers.models.tensor_files import AT_ONCE, FileWriter, write_model_file

if TYPE_CHECKING:
    from workers.config import ModelConfig
    from workers.training.engine import TrainEngine

SHARD_BYTES = 5 * 10**9
"""Weights above this are cut into several safetensors files."""
KEPT = (".json", ".jinja", ".txt", ".model", ".py")
"""Endings of the files that are copied: configuration, tokenizer, templates, code."""


def export_huggingface(
    engine: TrainEngine,
    folder: Path,
    writes: bool,
    shard_bytes: int = SHARD_BYTES,
    writer: FileWriter = AT_ONCE,
) -> None:
    """Gather the weights on all ranks, by tensors; the one that `writes` puts them in `folder`."""
    tensors = engine.named_full_tensors()
    try:
        if writes:
            write_model_folder(
                engine.whole_module,
                engine.model_config,
                ((name, tensor.cpu()) for name, tensor in tensors),
                folder,
                engine.reading.folder_settings,
                shard_bytes,
                writer,
            )
    finally:
        # The other ranks are in the same collectives: go through them to the end.
        deque(tensors, maxlen=0)


def write_model_folder(
    module: Any,
    model_config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    settings: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
    writer: FileWriter = AT_ONCE,
) -> None:
    """The `tensors`, whole and by their Hugging Face names, with the files that go with `module`.

    `settings` is what `config.json` of a classifier says beside the model's own fields.
    """
    source = model_folder(model_config.path)
    buffers = {name for name, _ in persistent_buffers(module)}
    folder.mkdir(parents=True, exist_ok=True)
    config = _copy_files(source, folder)
    if isinstance(module, ScalarHeadModel):
        config = _as_classifier(config) | dict(settings)
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    dtype = _stored_dtype(config, model_config)
    typed = ((n, t if n in buffers else t.to(dtype)) for n, t in tensors)
    _write_weights(checkpoint_format(str(source)).stored(typed), folder, shard_bytes, writer)


def _stored_dtype(config: Mapping[str, Any], model_config: ModelConfig) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or model_config.dtype
    found: torch.dtype = getattr(torch, name)
    return found


def _copy_files(source: Path, folder: Path) -> dict[str, Any]:
    """Everything but weights; returns the model's configuration."""
    for path in source.iterdir():
        if path.is_file() and path.suffix in KEPT and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def _as_classifier(config: dict[str, Any]) -> dict[str, Any]:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config["model_type"])
    return config | ({"architectures": [name]} if name else {})


def _write_weights(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int, writer: FileWriter
) -> None:
    """One `model.safetensors`, or numbered ones with their index; one shard in memory at a time."""
    drafts: list[tuple[Path, list[str]]] = []
    total = 0
    for shard in _shards(tensors, shard_bytes):
        path = folder / f"draft-{len(drafts)}"
        write_model_file(shard, path, writer)
        drafts.append((path, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())

    if len(drafts) == 1:
        writer.rename(drafts[0][0], folder / "model.safetensors")
        return

    weight_map = {}
    for number, (path, names) in enumerate(drafts, 1):
        file_name = f"model-{number:05d}-of-{len(drafts):05d}.safetensors"
        writer.rename(path, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The tensors by name, as many together as fit into a shard; a larger one alone."""
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        stored = tensor.contiguous()
        size = stored.nbytes
        if shard and filled + size > shard_bytes:
            yield shard
            shard.clear()  # the same dict, so that the caller's does not keep the tensors alive
            filled = 0
        shard[name] = stored
        filled += size
    yield shard
