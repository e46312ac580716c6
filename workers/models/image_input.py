"""The images in the rows of a model's passes.

    numbers = images.of_row(ids, refs, name)                # when a row arrives, per token
    inputs |= images.arguments(inputs, numbers, device)     # before a pass over some of the tokens

The numbers of a token are 1 + the number of its image (0: text) and, for classes whose positions
have three axes (Qwen-VL), its positions. They are cut, ordered and packed like the tokens, and each
pass gets the pixels of the images whose tokens it has.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_like.batch.ragged import RaggedTensor
from workers.images import ImageRef
from workers.models.causal_lm import body_of
from workers.models.images import ImageReader

TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments of `forward` that mark the tokens of images."""


class ImageInput:
    """The arguments of a model's passes over rows with images."""

    def __init__(self, module: Any, reader: ImageReader) -> None:
        """Look up which arguments the model's class takes."""
        self.reader = reader
        body = body_of(module)
        self.types = [name for name in TYPES if name in inspect.signature(body.forward).parameters]
        self.dtype: torch.dtype = body.dtype
        self.rope = next((part for part in body.modules() if hasattr(part, "get_rope_index")), None)
        """The module that computes positions on three axes, if the class has such positions."""
        both_ways = getattr(body.config.get_text_config(), "use_bidirectional_attention", None)
        self.looks_ahead = "token_type_ids" in self.types or both_ways == "vision"
        """True if the tokens of an image attend to later ones, so that rows cannot be packed."""

    def of_rows(
        self,
        columns: Mapping[str, RaggedTensor],
        images: Sequence[Sequence[Any]],
        names: Sequence[str],
    ) -> RaggedTensor:
        """Return the numbers of all tokens; `images` has the references of each row, or pair.

        `columns` has input_ids and position_ids. Where these begin at 0 again, a trajectory has a
        new segment, in which the positions of images begin at 0, too.
        """
        self.reader.load(zip((refs or () for refs in images), names, strict=True))
        ids = columns["input_ids"]
        sides = ids.lengths[0].numel() if len(ids) else 1
        numbers = [torch.zeros(0, 1 if self.rope is None else 4, dtype=torch.int64)]
        rows = zip(ids.flatten().rows(), columns["position_ids"].flatten().rows(), strict=True)
        for place, (row, positions) in enumerate(rows):
            images_of_row = images[place // sides] or ()
            of_row = self.of_row(row, images_of_row, names[place // sides])
            begins = (positions == 0).nonzero().squeeze(1)
            if len(begins) > 1:
                of_row[:, 1:] -= of_row[begins, 1:][(positions == 0).cumsum(0) - 1]
            numbers.append(of_row)
        return ids.with_values(torch.cat(numbers))

    def of_row(self, ids: Tensor, images: Sequence[Any], name: str) -> Tensor:
        """Return the numbers of a row's tokens, [tokens, 1 or 4]; errors call it `name`."""
        refs = [ImageRef(*ref) for ref in images]
        places = self.reader.places(ids, refs, name)
        if self.rope is None:
            return places[:, None]
        positions = torch.arange(len(ids)).expand(3, -1)
        if refs:
            grids = self.reader.grids(refs)
            types = (places > 0).int()[None]
            positions = self.rope.get_rope_index(ids[None], mm_token_type_ids=types, **grids)[0][
                :, 0
            ]
        return torch.cat([places[None], positions]).T

    def arguments(
        self, inputs: Mapping[str, Tensor], numbers: Tensor, device: torch.device
    ) -> dict[str, Tensor]:
        """Return the arguments of a pass over these tokens, in addition to or instead of `inputs`.

        `inputs` has input_ids and, if the pass gets positions, position_ids.
        """
        places, shape = numbers[:, 0], inputs["input_ids"].shape
        refs = self.reader.refs_at(places)
        added = self.reader.inputs(refs) if refs else {}
        added |= {name: (places > 0).long().view(shape) for name in self.types}
        for name, tensor in added.items():
            dtype = self.dtype if tensor.is_floating_point() else None
            added[name] = tensor.to(device, dtype)
        if self.rope is not None and "position_ids" in inputs:
            axes = numbers[:, 1:].T.reshape(3, *shape).to(device)
            added["position_ids"] = torch.cat([inputs["position_ids"][None], axes])
        return added

    def left_padded(
        self, inputs: Mapping[str, Tensor], *, numbers: Sequence[Tensor], shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """Return the arguments of a pass over rows padded on the left to [rows, width].

        `numbers` has those of the first rows; the others are text.
        """
        padded = torch.zeros(*shape, numbers[0].shape[1], dtype=torch.int64)
        for row, of_row in zip(padded, numbers, strict=False):
            row[len(row) - len(of_row) :] = of_row
        return self.arguments(inputs, padded.flatten(0, 1), inputs["input_ids"].device)
