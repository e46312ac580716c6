"""Save and load the checkpoint folder of one role, which is always complete or absent.

    manifest.json       step, schedule, size and checksum of every file; written last
    shards/             weights and optimizer state by rank (contents: model, optimizer)
    random/<rank>.json  random state of each rank (contents: extra)
    huggingface/        a folder for `from_pretrained` (contents: hf_model)
    lora_adapter/       the adapter in peft's format, if the model has one

Everything is first written to `<folder>.part`, which is then renamed. With background writing
(`background_copies`), files go into the folder itself; the driver adds them to the manifest and
renames the folder of the step when everything is on disk. Tensors are stored by parameter name at
full shape, so another number of ranks, another strategy, or a plain module can load them. With LoRA
only trained weights are stored: the base comes from the model's path. Ranks agree after each stage,
so an error on one rank stops the save on all ranks.

The Hugging Face folder of an actor has the configuration, tokenizer and dtype of the model from
which the actor was loaded. Its weights are the new ones, with LoRA merged, under the names that
`save_pretrained` writes. A buffer keeps the dtype that it has in the module, such as float32 for a
router. A critic or reward model becomes a sequence classifier with one label: the body under its
usual names and the head as `score.weight`. `AutoModelForSequenceClassification` loads both if
transformers has a classifier for the model type; `AutoModel` loads only the body.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl_like.errors import CheckpointError
from verl_like.files import file_fault, fingerprint, replace_folder
from verl_like.process.random_state import load_random_state, save_random_state
from workers.models.causal_lm import ScalarHeadModel
from workers.models.checkpoint_format import checkpoint_format
from workers.models.folder import model_folder
from workers.models.precision import dtype_of
from workers.models.state import persistent_buffers
from workers.models.tensor_files import WRITE_NOW, FileWriter, write_model_file
from workers.training.checkpoints.manifest import (
    ADAPTER,
    MARKER,
    loaded_files,
    read_manifest,
    reject_damaged,
    write_manifest,
)
from workers.training.checkpoints.shards import Ranks, read_shards, stored_tensors, write_on_all
from workers.weights.full_weights import describe_problems

if TYPE_CHECKING:
    from workers.config import ModelConfig
    from workers.training.checkpoints.background_copies import FileCopies
    from workers.training.engine import TrainEngine
    from workers.training.moving_average import WeightAverage


logger = logging.getLogger(__name__)


def save(
    engine: TrainEngine,
    average: WeightAverage | None,
    folder: Path,
    step: int,
    contents: Sequence[str],
    copies: FileCopies | None = None,
) -> None:
    """Write the folder, whole or not at all; every rank calls this.

    If anything fails, an earlier folder stays unchanged. Files that `copies` takes are written
    later, into a folder that nobody reads yet.
    """
    message = f"the checkpoint {folder} was not written (an earlier one is untouched)"
    ranks = Ranks(engine.groups.world, message)
    part = folder if copies is not None else folder.with_name(folder.name + ".part")
    try:
        _write_part(engine, average, ranks, part, step, contents, copies or WRITE_NOW)
        if part != folder:
            ranks.run_on_first(lambda: replace_folder(part, folder))
    except CheckpointError:
        if ranks.mine == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _write_part(
    engine: TrainEngine,
    average: WeightAverage | None,
    ranks: Ranks,
    part: Path,
    step: int,
    contents: Sequence[str],
    writer: FileWriter,
) -> None:
    """Write all files; the manifest comes last and lists the others."""

    def make_empty() -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)  # raises if it is a link
        (part / "random").mkdir()

    tensors = weights(engine) | averages(average) if "model" in contents else {}
    tensors |= optimizer_state(engine) if "optimizer" in contents else {}
    tensors = engine.without_copies(tensors)
    ranks.run_on_first(make_empty)
    if tensors:
        write_on_all(ranks, tensors, part / "shards", engine.groups.stage, writer)
    if "extra" in contents:
        ranks.run_on_all(lambda: save_random_state(part / "random" / f"{ranks.mine}.json"))
    _write_adapter(engine, ranks, part, writer)
    if "hf_model" in contents:
        exported, is_first = part / "huggingface", ranks.mine == 0
        ranks.run_on_all(lambda: export_huggingface(engine, exported, is_first, writer=writer))

    manifest = {
        "step": step,
        "num_ranks": ranks.count,
        "contents": list(contents),
        "schedule_step": engine.scheduler.num_steps,
        "skipped_steps": engine.guard.total,
        "skipped_in_a_row": engine.guard.in_a_row,
        "files": ranks.share_files(part, fingerprint),
    }
    ranks.run_on_first(lambda: write_manifest(part, manifest))


def export(engine: TrainEngine, folder: Path) -> None:
    """Write the model into the folder for `from_pretrained`; every rank calls this."""
    ranks = Ranks(engine.groups.world, f"the model {folder} was not written")
    is_first = ranks.mine == 0
    ranks.run_on_all(lambda: export_huggingface(engine, folder, is_first))
    _write_adapter(engine, ranks, folder, WRITE_NOW)


def _write_adapter(engine: TrainEngine, ranks: Ranks, folder: Path, writer: FileWriter) -> None:
    """Write the adapter of a LoRA model into `folder`, in peft's format."""
    if engine.model_config.lora_rank == 0:
        return
    from workers.models.lora import save_adapter

    with engine.running():  # collective
        adapter = [(name, tensor.cpu()) for name, tensor in engine.full_trained_tensors()]
    out, module = folder / ADAPTER, engine.whole_module
    ranks.run_on_first(lambda: save_adapter(out, module, engine.model_config, adapter, writer))


def load(engine: TrainEngine, average: WeightAverage | None, folder: Path) -> None:
    """Load the folder, written by any number of ranks; every rank calls this.

    Raise if the folder is damaged or belongs to another model.
    """
    ranks = Ranks(engine.groups.world, f"the checkpoint {folder} was not loaded")
    manifest = ranks.run_on_all(lambda: read_manifest(folder))[ranks.mine]
    files = {folder / name: fingerprint for name, fingerprint in manifest["files"].items()}
    faults = ranks.share_files(
        folder, lambda path: file_fault(path, files[path]), loaded_files(manifest)
    )
    reject_damaged(folder, faults)

    shards = folder / "shards"
    saved = stored_tensors(shards) if shards.is_dir() else {}
    has_adapter = engine.model_config.lora_rank > 0
    reject_other_model(folder, stored_weights(engine.whole_module, has_adapter), saved)
    with engine.running(engine.optimizer):
        state = empty_optimizer_state(engine, saved)
        averaged = {name: shard for name, shard in averages(average).items() if name in saved}
        tensors = weights(engine) | state | averaged
        ranks.run_on_all(lambda: read_shards(tensors, shards))
        parameters = dict(engine.module.named_parameters())
        optimizer = _optimizer_of(engine)
        optimizer.state.clear()
        for full_name, value in state.items():
            _, key, name = full_name.split(".", 2)
            optimizer.state[parameters[name]][key] = value
        if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            optimizer.load_state_dict(optimizer.state_dict())  # may derive more from the state
        if average is not None and not averaged:
            logger.warning("%s holds no moving average: it starts from the weights.", folder)
            average.restart()

    if "optimizer" not in manifest["contents"]:
        logger.warning(
            "%s holds no optimizer state (checkpoint.save_contents lacked 'optimizer'): the "
            "moments start from zero.",
            folder,
        )
    if "extra" in manifest["contents"]:
        engine.scheduler.set_step(manifest["schedule_step"])
        engine.guard.total = manifest["skipped_steps"]
        engine.guard.in_a_row = manifest["skipped_in_a_row"]
        if manifest["num_ranks"] == ranks.count:
            ranks.run_on_all(lambda: load_random_state(folder / "random" / f"{ranks.mine}.json"))


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    """Return the rank's shards of the trained weights and buffers, as `model.<name>`."""
    return stored_weights(engine.module, engine.model_config.lora_rank > 0)


def stored_weights(module: nn.Module, has_adapter: bool) -> dict[str, Tensor]:
    """Return the weights of a module that a checkpoint stores, as `model.<name>`.

    Frozen parameters are not stored, and with an adapter neither are buffers: they do not change.
    """
    tensors = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            tensors[f"model.{name}"] = parameter.detach()

    if not has_adapter:
        tensors |= {f"model.{name}": buffer for name, buffer in persistent_buffers(module)}
    return tensors


def averages(average: WeightAverage | None) -> dict[str, Tensor]:
    """Return the rank's shards of the moving average, as `average.<name>`; empty without one."""
    tensors = {} if average is None else average.tensors
    return {f"average.{name}": tensor for name, tensor in tensors.items()}


def optimizer_state(engine: TrainEngine) -> dict[str, Tensor]:
    """Return the rank's shards of the optimizer's tensors, as `optimizer.<key>.<name>`.

    Before its first step, the optimizer has no tensors.
    """
    state = {}
    for name, parameter in engine.module.named_parameters():
        for key, value in _optimizer_of(engine).state.get(parameter, {}).items():
            full_name = f"optimizer.{key}.{name}"
            is_tensor = isinstance(value, Tensor)
            if not is_tensor or value.shape not in (torch.Size(), parameter.shape):
                form = list(value.shape) if is_tensor else type(value).__name__
                raise CheckpointError(
                    f"{full_name} of {type(engine.optimizer).__name__} is of form {form}; only a "
                    "scalar tensor, or one of its weight's shape, can be resharded. Leave "
                    "optimizer out of checkpoint.save_contents."
                )
            state[full_name] = value
    return state


def _optimizer_of(engine: TrainEngine) -> torch.optim.Optimizer:
    assert engine.optimizer is not None, "only trained engines save the state of an optimizer"
    return engine.optimizer


def empty_optimizer_state(engine: TrainEngine, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Return empty tensors into which the saved state is read, sharded like their weights."""
    parameters = dict(engine.module.named_parameters())
    elsewhere = dict(engine.whole_module.named_parameters()).keys() - parameters.keys()
    groups = _optimizer_of(engine).param_groups
    # Fused optimizers keep their scalars on the device of the weights, others on the CPU.
    on_weight_device = any(group.get("fused") or group.get("capturable") for group in groups)

    state: dict[str, Tensor] = {}
    for name, stored in saved.items():
        if not name.startswith("optimizer."):
            continue
        own_name = name.split(".", 2)[-1]
        if own_name in elsewhere:
            continue
        parameter = parameters.get(own_name)
        if parameter is None:
            raise CheckpointError(
                f"the checkpoint has {name}, but this run does not train that weight"
            )
        dtype = stored.properties.dtype
        if stored.size:
            state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            device = parameter.device if on_weight_device else "cpu"
            state[name] = torch.zeros((), dtype=dtype, device=device)
    return state


def reject_other_model(
    folder: Path,
    expected: dict[str, Tensor],
    saved: dict[str, Any],
    remedy: str = "Restore model.path (and model.lora_rank), or start again in another "
    "trainer.default_local_dir.",
) -> None:
    """Reject a checkpoint with missing, unknown or differently shaped tensors; one error lists all.

    `expected` are the `stored_weights` of this model, `saved` the entries of `stored_tensors`.
    """
    here = {name: list(tensor.shape) for name, tensor in expected.items()}
    there = {name: list(stored.size) for name, stored in saved.items() if name.startswith("model.")}
    if not there:
        raise CheckpointError(
            f"the checkpoint {folder} has no weights: checkpoint.save_contents lacked 'model'. "
            "Choose another checkpoint, or train again with 'model' in checkpoint.save_contents."
        )
    other_shape = [
        f"{name} ({there[name]} in the checkpoint, {shape} in this run)"
        for name, shape in here.items()
        if there.get(name, shape) != shape
    ]
    problems = {
        "missing in the checkpoint": [name for name in here if name not in there],
        "unknown here": [name for name in there if name not in here],
        "of another shape": other_shape,
    }
    named = {kind: [n.removeprefix("model.") for n in names] for kind, names in problems.items()}
    if text := describe_problems(f"the checkpoint {folder} belongs to a different model", **named):
        raise CheckpointError(f"{text} {remedy}")


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
