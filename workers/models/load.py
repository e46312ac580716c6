"""Load weights from a Hugging Face folder into an empty module, one tensor at a time.

Each rank of a sharded module reads its own slices, and buffers whole, from safetensors or mapped
`.bin` files. Weights that a checkpoint stores in a different layout
(`workers.models.checkpoint_format`) are assembled one group at a time. Unknown entries and missing
weights are rejected, because the model would silently compute wrong numbers. A folder with only a
config.json can get random weights (`random_init_seed`).
"""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_like.errors import ConfigError
from verl_like.files import read_json_object
from workers.config import ModelConfig
from workers.config.conditions import is_bare_config
from workers.models.causal_lm import Head, ScalarHeadModel, empty_model
from workers.models.classes import build_class
from workers.models.folder import model_folder, read_hf_config
from workers.models.state import is_adapter, local_rows, local_shard, named_state

if TYPE_CHECKING:
    from workers.models.checkpoint_format import WeightGroup

COMPUTED = (
    r"rotary_emb\.inv_freq$",
    r"(^|\.)position_ids$",
    r"(^|\.)(attn|attention)\.(masked_)?bias$",
)
"""Entries in older folders that models now compute: rotary tables, positions, causal masks."""
SCORE = "score.weight"
"""The name of the scalar head's weight in sequence classifiers."""
NO_SCORE = (
    f"has no {SCORE} of [1, hidden]: it is not a reward model with one output (a sequence "
    "classifier with num_labels=1)."
)
logger = logging.getLogger(__name__)


def load_model(
    config: ModelConfig,
    head: Head,
    device: torch.device | None = None,
    quantization: str | None = None,
) -> Any:
    """Return the whole module on one device, in evaluation mode.

    Example:

        module = load_model(ModelConfig(path="models/verifier"), head="token")

    Args:
        config: the model's section, such as `config.actor_rollout_ref.model`.
        head: "token" for a language model, "scalar" for a critic, "score" for a reward model.
        device: by default the CPU.
        quantization: "int8" stores linear weights as int8; None keeps them.
    """
    device = device or torch.device("cpu")
    module = empty_model(config, head, device)
    if quantization:
        from workers.models.quantize import quantize_linears

        quantize_linears(module, device)
    load_weights(module, config, head, device)
    return module


def load_weights(
    module: Any, config: ModelConfig, head: Head, device: torch.device, full_module: Any = None
) -> None:
    """Allocate every parameter on `device`, and load every weight; on "meta", only compare shapes.

    If other ranks have other layers, `full_module` is the module with all layers, on the meta
    device.
    """
    if device.type != "meta":
        materialize(module, device)
    full_module = module if full_module is None else full_module
    source = Folder(model_folder(config.path), module.base_model_prefix)
    may_start_at_zero = isinstance(module, ScalarHeadModel) and head == "scalar"
    missing: dict[str, Tensor] = {}
    unfit = []
    with torch.no_grad():
        for name, weight in named_state(module):
            origin = name.replace(".base_layer.", ".")
            if is_adapter(name):
                from workers.models.lora import initial_value

                _copy(weight, initial_value(name, weight.shape))
            elif may_start_at_zero and name == SCORE and not source.has_scalar_head(weight.shape):
                weight.zero_()
            elif (stored := source.find(origin)) is None:
                missing[origin] = weight
            elif wrong := _other_shape(origin, stored, weight.shape):
                unfit.append(wrong)
            else:
                _copy(weight, stored)

        if isinstance(module, ScalarHeadModel):
            _check_head(full_module, config, source)
        if head == "score" and SCORE in missing:
            raise ConfigError(f"the model {config.path!r} {NO_SCORE}")
        _reject_unfit(config, unfit)
        stored_names = _load_converted(module, missing, config, source) if missing else set[str]()
        if not missing and full_module is not module:
            from workers.models.checkpoint_format import checkpoint_format

            groups = checkpoint_format(str(source.path)).groups.values()
            stored_names = {name for group in groups for name in group.stored}
        extra = _describe_unused(module, source.unknown_entries(full_module, stored_names))
        if missing and not is_bare_config(config.path):
            raise ConfigError(
                f"the model {config.path!r} lacks {len(missing)} of its weights: "
                f"{', '.join([*missing][:20])}{f'; it also has {extra}' if extra else ''}. Save it "
                "again with save_pretrained."
            )
        if extra:
            raise ConfigError(
                f"the model {config.path!r} has {extra}. Its outputs would probably be wrong: "
                "config.json may describe a different model, or the folder may be quantized. Save "
                "it again with save_pretrained."
            )
        values = random_weights(config) if missing else {}
        for name, weight in missing.items():
            _copy(weight, values[name])


def check_score_head(key: str, path: str) -> None:
    """Reject a reward model's folder without a score head, before any process loads it.

    A model whose tensor names are unknown, because neither its weights nor an index are downloaded,
    is not checked.
    """
    names = Folder(model_folder(path, weights=False), "").files
    if names and SCORE not in names:
        raise ConfigError(f"{key}={path!r} {NO_SCORE}")


def _check_head(module: ScalarHeadModel, config: ModelConfig, source: Folder) -> None:
    """Reject a head that would not be loaded completely, such as one with a bias."""
    has_head = source.has_scalar_head(module.score.weight.shape)
    others = [name for name in source.files if name.startswith("score.") and name != SCORE]
    if has_head and others:
        raise ConfigError(
            f"the model {config.path!r}: its head has {', '.join(others)}, but a score is "
            f"computed only from {SCORE}. Save the model without them."
        )
    if module.config.num_labels == 1 and not (has_head or is_bare_config(config.path)):
        raise ConfigError(
            f"the model {config.path!r} is a classifier with one label according to its "
            f"config.json, but its weights have no {SCORE} of [1, hidden]. Save it again with "
            "save_pretrained, or remove id2label from config.json to start from a head of zeros."
        )


def materialize(module: Any, device: torch.device) -> None:
    """Allocate uninitialized parameters; buffers keep their values, tied parameters stay tied.

    Buffers that the model's class keeps in float32, whatever the model's dtype (router biases), are
    float32 here, too.
    """
    precise = module._keep_in_fp32_modules_strict or ()
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    buffers = []
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((child, name))
        for name, buffer in child._buffers.items():
            if buffer is not None:
                buffers.append((child, name, buffer))

    module._apply(partial(_empty, device=device))
    for (first, first_name), *others in owners.values():
        for child, name in others:
            child._parameters[name] = first._parameters[first_name]
    for child, name, buffer in buffers:
        dtype = torch.float32 if name in precise else buffer.dtype
        child._buffers[name] = buffer.to(device, dtype)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    """Return an empty tensor; `empty_like` could use a cached DTensor mesh that is closed."""
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    local = torch.empty_like(tensor.to_local(), device=device)
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class PickledTensors:
    """The tensors of a `.bin` file, mapped into memory; a slice reads only its own bytes.

    Files that torch wrote before 1.6 cannot be mapped and are read whole. No code in a file runs.
    """

    def __init__(self, path: Path) -> None:
        can_map = zipfile.is_zipfile(path)
        self._tensors = torch.load(path, map_location="cpu", mmap=can_map, weights_only=True)

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return [name for name, value in self._tensors.items() if isinstance(value, Tensor)]

    def get_slice(self, name: str) -> Tensor:
        """Return the tensor, of which only the requested slices are read."""
        tensor: Tensor = self._tensors[name]
        return tensor


def _shape_of(stored: Any) -> list[int]:
    """Return the shape of a tensor, or of a slice of a safetensors file."""
    return list(stored.shape if isinstance(stored, Tensor) else stored.get_shape())


class Folder:
    """The weights of a Hugging Face folder, by tensor name; only requested slices are read.

    The weights are read from safetensors files, or from `pytorch_model.bin` if there are none.
    """

    def __init__(self, path: Path, prefix: str) -> None:
        self.path = path
        self.prefix = prefix + "."
        self.opened: dict[str, Any] = {}
        self.files: dict[str, str] = {}
        for file in ("model.safetensors", "pytorch_model.bin"):
            index = path / f"{file}.index.json"
            if index.is_file():
                try:
                    self.files = read_json_object(index)["weight_map"]
                except (OSError, ValueError, KeyError) as error:
                    raise ConfigError(f"{index} cannot be read: {error}") from error
            elif (path / file).is_file():
                self.files = dict.fromkeys(self._open(file).keys(), file)
            if self.files:
                break

    def find(self, name: str) -> Any:
        """Return the tensor with this name, with or without the base model's prefix, or None."""
        for spelled in self._spellings(name):
            if spelled in self.files:
                return self._open(self.files[spelled]).get_slice(spelled)
        return None

    def has_scalar_head(self, shape: torch.Size) -> bool:
        """True if the folder is a sequence classifier with one label."""
        return SCORE in self.files and _shape_of(self.find(SCORE)) == list(shape)

    def unknown_entries(self, module: Any, converted: set[str]) -> list[str]:
        """Return the entries that are not weights or buffers of `module` and were not `converted`.

        If `module` has a scalar head, entries outside the base model, such as another head, are
        ignored.
        """
        known = converted | {
            n.replace(".base_layer.", ".") for n, _ in module.named_parameters("", True, False)
        }
        known |= {name for name, _ in module.named_buffers("", True, False)}
        extra = [name for name in self.files if known.isdisjoint(self._spellings(name))]
        if isinstance(module, ScalarHeadModel):
            bodies = [name for name in extra if name.startswith(self.prefix)]
            extra = bodies if any(name.startswith(self.prefix) for name in self.files) else extra
        return extra

    def _spellings(self, name: str) -> tuple[str, str, str]:
        return name, name.removeprefix(self.prefix), self.prefix + name

    def _open(self, file: str) -> Any:
        if file not in self.opened:
            try:
                path = self.path / file
                is_pickle = path.suffix == ".bin"
                self.opened[file] = (
                    PickledTensors(path) if is_pickle else safe_open(path, framework="pt")
                )
            except (OSError, SafetensorError, UnpicklingError, RuntimeError) as error:
                raise ConfigError(f"{self.path / file} cannot be read: {error}") from error
        return self.opened[file]


def _load_converted(
    module: Any, missing: dict[str, Tensor], config: ModelConfig, source: Folder
) -> set[str]:
    """Fill the weights that the folder stores in a different layout, and remove them from
    `missing`.

    Returns the names of the folder's tensors from which they were converted, and of a language
    model's head that the module does not have.
    """
    from workers.models.checkpoint_format import checkpoint_format

    groups, taken = checkpoint_format(str(source.path)).groups, set[str]()
    for name in [*missing]:
        group = groups.get(name)
        if name not in missing or group is None:
            continue
        if any(source.find(stored) is None for stored in group.stored):
            continue
        shapes = group.stored.items()
        wrong = [_other_shape(name, source.find(name), shape) for name, shape in shapes]
        _reject_unfit(config, [*filter(None, wrong)])
        _fill_group(missing, group, source)
        taken |= set(group.stored)
    if isinstance(module, ScalarHeadModel):
        outside = (n for n in groups if not n.startswith(source.prefix))
        taken |= {stored for name in outside for stored in groups[name].stored}
    return taken


def _fill_group(missing: dict[str, Tensor], group: WeightGroup, source: Folder) -> None:
    """Fill the weights of one group; its tensors are freed before the next group is read.

    If experts are stored separately, a rank reads only the slices that it needs.
    """
    weights = {name: missing.pop(name) for name in group.names if name in missing}
    stacked = group.stacked
    if stacked is not None:
        (weight,) = weights.values()
        _copy(weight, _Stacked([[source.find(name) for name in of_one] for of_one in stacked]))
        return
    if all(weight.is_meta for weight in weights.values()):
        return
    read = group.read(lambda name: source.find(name)[:])
    for name, weight in weights.items():
        _copy(weight, read[name])


@dataclass(frozen=True)
class _Stacked:
    """Represents a weight of all experts; slices of it are read from the tensors of each expert.

    The tensors of one expert are concatenated along their first dimension.
    """

    experts: list[list[Any]]

    def __getitem__(self, where: Any) -> Tensor:
        experts, rows, *others = (slice(None),) * 2 if where is Ellipsis else where
        return torch.stack(
            [_end_to_end(tensors, rows, others) for tensors in self.experts[experts]]
        )


def _end_to_end(tensors: list[Any], rows: slice, others: list[slice]) -> Tensor:
    slices, begin = [], 0
    for tensor in tensors:
        size = _shape_of(tensor)[0]
        first, last, _ = rows.indices(begin + size)
        if max(first, begin) < last:
            slices.append(tensor[(slice(max(first - begin, 0), last - begin), *others)])
        begin += size
    return slices[0] if len(slices) == 1 else torch.cat(slices)


def _other_shape(name: str, stored: Any, expected_shape: torch.Size) -> str:
    """Return what is wrong with the shape of a folder's tensor; "" if nothing is."""
    there, here = _shape_of(stored), list(expected_shape)
    return "" if there == here else f"{name} (is {there}, config.json says {here})"


def _reject_unfit(config: ModelConfig, unfit: list[str]) -> None:
    if unfit:
        raise ConfigError(
            f"the model {config.path!r} has weights with the wrong shape: {', '.join(unfit[:20])}. "
            "Save it again with save_pretrained."
        )


def _describe_unused(module: Any, names: Iterable[str]) -> str:
    """Describe the entries that are not known to be superfluous; "" if there are none.

    Entries are superfluous if the transformers class ignores them (such as multi-token prediction
    layers), if models now compute them, or if they are the head of a classifier.
    """
    ignored = [*COMPUTED, *(module._keys_to_ignore_on_load_unexpected or ()), r"^score\."]
    extra = sorted(name for name in names if not re.search("|".join(ignored), name))
    entries = "1 entry" if len(extra) == 1 else f"{len(extra)} entries"
    return f"{entries} that the model does not use: {', '.join(extra[:20])}" if extra else ""


def _copy(weight: Tensor, stored: Any) -> None:
    local = local_shard(weight)
    if local.numel() and not local.is_meta:
        local.copy_(local_rows(weight, stored))


def check_files(module: Any, config: ModelConfig, head: Head) -> None:
    """Reject a folder whose weights do not fit the module, on the meta device; no weight is read.

    Weights that are not downloaded yet are not checked.
    """
    folder = model_folder(config.path, weights=False)
    files = {folder / file for file in Folder(folder, "").files.values()}
    if files and all(file.is_file() for file in files):
        here = replace(config, path=str(folder))
        load_weights(module, here, head, torch.device("meta"))


def check_weights(key: str, path: str, model: ModelConfig | None) -> None:
    """Reject a folder without weights, unless the model may be random and has a seed."""
    if (model is None or model.random_init_seed is None) and is_bare_config(path):
        seed = f"{model.SECTION}.random_init_seed=<number>" if model else ""
        raise ConfigError(
            f"{key}={path} has a config.json and no weights. Use a folder that save_pretrained "
            f"wrote{f', or set {seed} to start from random weights' if seed else ''}."
        )


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Return random weights, drawn as transformers does, for a folder that has only a config.json.

    The result has all weights of the causal LM by name, in float32 in host memory, and is equal on
    every rank.
    """
    check_weights(f"{config.SECTION}.path", config.path, config)
    assert config.random_init_seed is not None, "a folder without weights and seed was let through"
    logger.info("the model %s: random weights, seed %d", config.path, config.random_init_seed)
    hf_config = read_hf_config(model_folder(config.path))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.random_init_seed)
        model = build_class(hf_config, dtype=torch.float32)
    weights: dict[str, Tensor] = model.state_dict()
    return weights
