"""A trained model as a Hugging Face folder for `from_pretrained`.

The export of an actor has the configuration, tokenizer and dtype of the model from which the actor
was loaded. Its weights are the new ones, with LoRA merged, under the names that `save_pretrained`
writes. A buffer keeps the dtype that it has in the module, such as float32 for a router. A critic
or reward model becomes a sequence classifier with one label: the body under its usual names and the
head as `score.weight`. `AutoModelForSequenceClassification` loads both if transformers has a
classifier for the model type; `AutoModel` loads only the body.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from workers.models.causal_lm import ScalarHeadModel
from workers.models.checkpoint_format import checkpoint_format
from workers.models.folder import model_folder
from workers.models.precision import dtype_of
from workers.models.state import persistent_buffers
from workers.models.tensor_files import WRITE_NOW, FileWriter, write_model_file
from workers.training.checkpoints.manifest import MARKER

if TYPE_CHECKING:
    from workers.config import ModelConfig
    from workers.training.engine import TrainEngine

SHARD_BYTES = 5 * 10**9
"""Larger weights are split into several safetensors files."""
COPIED = (".json", ".jinja", ".txt", ".model", ".py")
"""Suffixes of the files that are copied: configuration, tokenizer, templates, code."""


def export_huggingface(
    engine: TrainEngine,
    folder: Path,
    writes: bool,
    shard_bytes: int = SHARD_BYTES,
    writer: FileWriter = WRITE_NOW,
) -> None:
    """Gather the weights one by one on all ranks; the rank with `writes` writes the folder."""
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
        # All ranks must run the same collectives, also after an error: run the remaining ones.
        deque(tensors, maxlen=0)


def write_model_folder(
    module: Any,
    model_config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    settings: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
    writer: FileWriter = WRITE_NOW,
) -> None:
    """Write the `tensors`, whole and under their Hugging Face names, and the other files of the
    model.

    `settings` are extra fields for the `config.json` of a classifier.
    """
    source = model_folder(model_config.path)
    buffers = {name for name, _ in persistent_buffers(module)}
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        of_weights = path.name.endswith(".index.json") or path.name == MARKER
        if path.is_file() and path.suffix in COPIED and not of_weights:
            shutil.copyfile(path, folder / path.name)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if isinstance(module, ScalarHeadModel):
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        )

        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config["model_type"])
        config |= {"architectures": [name]} if name else {}
        config |= settings
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    dtype = dtype_of(config.get("dtype") or config.get("torch_dtype") or model_config.dtype)
    typed = ((n, t if n in buffers else t.to(dtype)) for n, t in tensors)
    _write_weights(checkpoint_format(str(source)).stored(typed), folder, shard_bytes, writer)


def _write_weights(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int, writer: FileWriter
) -> None:
    """Write one `model.safetensors`, or numbered files with an index, one shard at a time."""
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

    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(drafts, 1):
        file_name = f"model-{number:05d}-of-{len(drafts):05d}.safetensors"
        writer.rename(path, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield dicts of tensors that fit into a shard; a tensor that is larger gets its own dict."""
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors:
        stored = tensor.contiguous()
        size = stored.nbytes
        if shard and filled + size > shard_bytes:
            yield shard
            shard.clear()  # the same dict: a new one would keep the caller's tensors alive
            filled = 0
        shard[name] = stored
        filled += size
    yield shard
