"""Convert between the weights of a module and the tensors in its checkpoints.

For most mixtures of experts, transformers computes with tensors of all experts, but checkpoints and
their readers (`from_pretrained`, vLLM) use separate tensors per expert. transformers can convert
the weights of every model type, but only for a whole model at once. This module applies its
conversions to a few weights at a time, as they arrive. Exports, weight sync to vLLM, and loading
use it, so that none of them needs the whole model in memory.

    checkpoint = checkpoint_format(model_path)
    for name, tensor in checkpoint.stored(named_tensors): ...     # as `save_pretrained` writes
    checkpoint.groups[name].read(lambda stored: file[stored])       # {weight's name: tensor}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from workers.models.classes import meta_class
from workers.models.folder import read_hf_config
from workers.models.state import Named, named_state


@dataclass(frozen=True)
class WeightGroup:
    """Weights of a module that are converted together, and their tensors in a checkpoint."""

    names: tuple[str, ...]
    stored: dict[str, torch.Size]
    """Names and shapes in the checkpoint."""
    to_module: _Conversions

    @property
    def is_same(self) -> bool:
        """True if the checkpoint has the module's tensor under the same name."""
        return self.names == tuple(self.stored)

    def read(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the module's weights from the tensors of the checkpoint."""
        tensors = {name: read(name) for name in self.stored}
        return tensors if self.is_same else self.to_module.convert(tensors)

    @property
    def stacked(self) -> list[list[str]] | None:
        """Return the stored names per expert if the weight stacks all experts, otherwise None.

        The tensors of one expert are concatenated. The layout is detected by converting small
        tensors.
        """
        experts: dict[int, list[str]] = {}
        for name in self.stored:
            expert = re.search(r"\.experts\.(\d+)\.", name)
            experts.setdefault(int(expert[1]) if expert else -1, []).append(name)
        if self.is_same or len(self.names) > 1 or [*experts] != [*range(len(experts))]:
            return None
        numbers = torch.arange(float(len(self.stored) * 6)).view(-1, 2, 3)
        small = dict(zip(self.stored, numbers, strict=True))
        (converted,) = self.to_module.convert(small).values()
        if converted.shape[::2] != (len(experts), 3):
            return None
        for place, names in experts.items():
            names.sort(
                key=lambda name: int((converted[place, :, 0] == small[name][0, 0]).int().argmax())
            )
        expected = [torch.cat([small[name] for name in names]) for names in experts.values()]
        return [*experts.values()] if torch.stack(expected).equal(converted) else None


class _Conversions:
    """The transformers conversions of one model type, in one direction."""

    def __init__(self, model: Any, transforms: list[Any], is_reverse: bool) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.model, self.is_reverse = model, is_reverse
        self.renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self.converters = [t for t in transforms if isinstance(t, WeightConverter)]

    def rename(self, name: str) -> tuple[str, str | None]:
        """Return the new name, and the pattern of the converter that takes the tensor, or None."""
        from transformers.core_model_loading import rename_source_key

        renamed: tuple[str, str | None] = rename_source_key(
            name, self.renamings, self.converters, reverse=self.is_reverse
        )
        return renamed

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under their new names, split or joined as the converters say."""
        from transformers.core_model_loading import WeightRenaming, dot_natural_key

        started: dict[str, Any] = {}
        for name in sorted(tensors, key=dot_natural_key):  # experts in numerical order
            key, pattern = self.rename(name)
            if pattern is None:
                started[key], pattern = WeightRenaming(name, key), name
            elif key not in started:
                converter = next(c for c in self.converters if pattern in c.source_patterns)
                started[key] = deepcopy(converter)
            started[key].add_tensor(key, name, pattern, tensors[name])

        converted: dict[str, Tensor] = {}
        for key, transform in started.items():
            values = transform.convert(key, model=self.model, config=self.model.config)
            for name, value in values.items():
                converted[name] = value[0] if isinstance(value, list) else value
        return converted


TOWER = "vision_model"
"""Level of the towers of CLIP and SigLIP in published checkpoints and in vLLM.

transformers 5 has removed it, and `save_pretrained` writes it only for models that were loaded so.
"""


class CheckpointFormat:
    """A causal LM's weights, in groups that are converted together."""

    def __init__(self, model: Any, has_level: Callable[[], bool]) -> None:
        """`has_level` says, for models with such a tower, if checkpoints have the level `TOWER`."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        forward = []
        for change in get_model_conversion_mapping(model, add_legacy=False):
            # other prefixes of names in a folder are handled when they are looked up
            if not isinstance(change, PrefixChange):
                forward.append(change)
            elif change.prefix_to_remove == TOWER and has_level():
                forward.append(change)
        backward = [c.reverse_transform() for c in reversed(forward)]
        to_module = _Conversions(model, forward, is_reverse=False)
        self.to_stored = _Conversions(model, backward, is_reverse=True)
        together: dict[str, dict[str, Tensor]] = {}
        for name, weight in named_state(model):
            empty = torch.empty(weight.shape, device="meta")
            key, _ = self.to_stored.rename(name)  # equal for weights that are converted together
            together.setdefault(key, {})[name] = empty

        self.groups: dict[str, WeightGroup] = {}
        for members in together.values():
            converted = self.to_stored.convert(members)
            stored = {name: tensor.shape for name, tensor in converted.items()}
            group = WeightGroup(tuple(members), stored, to_module)
            self.groups |= dict.fromkeys(members, group)

        self.names = {name for group in self.groups.values() for name in group.stored}
        """Names of all tensors in a checkpoint."""
        self.unchanged = {name for name, group in self.groups.items() if group.is_same}
        """Names under which module and checkpoint have the same tensor."""

    def stored(self, tensors: Named) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a checkpoint; those of a group when all its weights have arrived.

        A tensor that waits for others of its group is copied. Other tensors are yielded before the
        next one is read, so the caller may reuse their memory.
        """
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in tensors:
            group = self.groups.get(name)
            if group is None or group.is_same:  # a critic's score is not a weight of the causal LM
                yield name, tensor
                continue
            arrived = waiting.setdefault(group.names, {})
            arrived[name] = tensor.clone() if len(group.names) > 1 else tensor
            if len(arrived) == len(group.names):
                yield from self.to_stored.convert(waiting.pop(group.names)).items()


def checkpoint_format(model_path: str) -> CheckpointFormat:
    """Return the format of the causal LM in this folder, without reading its weights."""

    model = meta_class(read_hf_config(model_path))

    def has_level() -> bool:
        # a tower itself may have that name
        others = {*_names_in(Path(model_path))} - {name for name, _ in named_state(model)}
        return any(f".{TOWER}." in name for name in others)

    return CheckpointFormat(model, has_level)


def _names_in(folder: Path) -> list[str]:
    """Return the names of the tensors in the safetensors files of a folder."""
    index, file = (folder / f"model.safetensors{end}" for end in (".index.json", ""))
    if index.is_file():
        return [*json.loads(index.read_text(encoding="utf-8"))["weight_map"]]
    if not file.is_file():
        return []
    with safe_open(file, framework="pt") as opened:
        return [*opened.keys()]
