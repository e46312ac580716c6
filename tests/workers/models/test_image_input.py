"""Rows with images: packed rows, padded rows and single rows have the numbers of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.models import vision
from tests.workers.models.vision import picture, write_model
from verl_like.batch.ragged import RaggedTensor
from workers.columns import IMAGES
from workers.images import ImageRef, image_ref
from workers.models.images import ImageInput, ImageReader
from workers.training.passes.attention import packed_rows
from workers.training.passes.packing import RowPasses, read

IMAGES_OF_ROWS = ((1, 2), (), (0,), (3, 0, 2, 1, 3), (2,), (2,))
"""The images of each row; the last two rows have the same prompt, too."""
PADDED = {"gemma3", "gemma4+large", "llama4", "qwen3_5"}
"""Images attend to later tokens, or a layer has a recurrent state or chunks."""
SIZES = ((40, 70), (90, 30), (33, 33), (64, 100))


@dataclass
class Case:
    module: Any
    reader: ImageReader
    rows: list[list[int]]
    refs: list[list[ImageRef]]
    starts: list[int]
    """The first token of each row whose logits are read."""
    begins: Sequence[Sequence[int]] = ()
    """Where the segments of each row begin; by default, each row is one segment."""
    prompts: list[str] = field(default_factory=list)
    """The text of each prompt, with a placeholder per image."""

    def passes(self, kind: str, rows: list[int], shares: bool = False) -> Tensor:
        """Return the logits at the read tokens of these rows, of one pass."""
        images = ImageInput(self.module, self.reader)
        tokens = [torch.tensor(self.rows[row]) for row in rows]
        ids = RaggedTensor.from_rows(tokens, max(map(len, tokens)))
        marks = [
            torch.arange(len(row_tokens)) >= self.starts[row]
            for row_tokens, row in zip(tokens, rows, strict=True)
        ]
        columns = {
            "input_ids": ids,
            "position_ids": ids.with_values(torch.cat([self.positions(row) for row in rows])),
        }
        refs = [self.refs[row] for row in rows]
        columns[IMAGES] = images.of_rows(columns, refs, [""] * len(rows))
        passes = RowPasses(kind, shares=shares)
        feed = passes.feed(columns, ids.with_values(torch.cat(marks)), torch.device("cpu"))
        assert feed.images is not None
        feed.inputs.update(images.arguments(feed.inputs, feed.images, torch.device("cpu")))
        return read(self.module, feed)

    def positions(self, row: int) -> Tensor:
        """Return the position of each token of a row in its segment."""
        begins = self.begins[row] if self.begins else [0]
        ends = [*begins[1:], len(self.rows[row])]
        return torch.cat(
            [torch.arange(end - begin) for begin, end in zip(begins, ends, strict=True)]
        )

    def of_transformers(self, row: int) -> Tensor:
        """Return the same logits as the processor and the class of transformers compute them."""
        types = [int(token == self.reader.token_id) for token in self.rows[row]]
        inputs = dict(self.reader.inputs(self.refs[row])) if self.refs[row] else {}
        for name, tensor in inputs.items():
            inputs[name] = tensor.to(self.module.dtype if tensor.is_floating_point() else None)
        for name in ImageInput(self.module, self.reader).types:
            inputs[name] = torch.tensor([types])
        output = self.module(input_ids=torch.tensor([self.rows[row]]), use_cache=False, **inputs)
        logits: Tensor = output.logits[0, self.starts[row] :]
        return logits


def make_case(
    family: str,
    folder: Path,
    for_vllm: bool = False,
    attention: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> Case:
    from transformers import AutoModelForImageTextToText

    write_model(family, folder, for_vllm=for_vllm)
    module = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    if dtype == torch.float64:
        module = module.double()  # `to` would make complex buffers real, such as Llama 4's
    reader = ImageReader(str(folder))
    for number, size in enumerate(SIZES):
        picture(*size, seed=number).save(folder / f"{number}.png")
    case = Case(module.eval(), reader, [], [], [])
    for place, numbers in enumerate(IMAGES_OF_ROWS):
        refs = [image_ref(f"{number}.png", [folder]) for number in numbers]
        text = f"<|user|>Is {reader.placeholder.join('what-of-this?'[: len(refs) + 1])}<|end|>"
        response = "a longer answer of some tokens"[place:]
        tokenize = reader.processor.tokenizer
        prompt = tokenize(reader.expanded(text, refs), add_special_tokens=False)["input_ids"]
        case.rows.append([*prompt, *tokenize(response, add_special_tokens=False)["input_ids"]])
        case.refs.append(refs)
        case.starts.append(len(prompt) - 1)
        case.prompts.append(text)
    return case


def close(ours: Tensor, theirs: Tensor, error: float = 1e-9) -> bool:
    return bool((ours - theirs).abs().max() <= error * theirs.abs().max())


def all_gradients(module: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", vision.CASES)
def test_rows_with_images_have_the_logits_and_gradients_of_transformers(
    family: str, tmp_path: Path
) -> None:
    case = make_case(family, tmp_path)
    every = list(range(len(case.rows)))
    expected = torch.cat([case.of_transformers(row) for row in every])
    weight = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    (expected * weight).sum().backward()
    tower = [p for name, p in case.module.named_parameters() if "vis" in name]
    assert any(weight.grad is not None for weight in tower), "images reach the tower"
    gradients = all_gradients(case.module)

    single = torch.cat([case.passes("padded", [row]) for row in every])
    assert close(single, expected)
    case.module.zero_grad()
    padded = case.passes("padded", every)
    assert close(padded, expected)
    (padded * weight).sum().backward()
    assert close(all_gradients(case.module), gradients, 1e-6)  # float32 norms
    if family in PADDED:
        return
    with packed_rows(case.module):
        for shares in (False, True):
            case.module.zero_grad()
            packed = case.passes("packed", every, shares)
            assert close(packed, expected)
            (packed * weight).sum().backward()
            assert close(all_gradients(case.module), gradients, 1e-6)
