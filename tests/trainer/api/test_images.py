"""Rows with images of PIL, and data sets of Hugging Face with images, train as files do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.workers.models.vision import picture, write_model
from verl_like import GRPO, SFT
from verl_like.errors import ConfigError

SIZES = ((40, 70), (90, 30), (33, 33))
PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How wide?"}]}]
TEXT = [{"role": "user", "content": "How wide?"}]


def width(response: str, images: list[Any], answer: int) -> float:
    (image,) = images
    return float(image.size[0] == answer) + len(response) / 100


def in_memory() -> list[dict[str, Any]]:
    pictures = [picture(*size, seed=number) for number, size in enumerate(SIZES)]
    return [
        {"prompt": PARTS if number else TEXT, "images": [image], "answer": image.size[0]}
        for number, image in enumerate(pictures)
    ]


def as_dataset() -> datasets.Dataset:
    rows = [row | {"prompt": PARTS, "image": row["images"][0]} for row in in_memory()]
    data = datasets.Dataset.from_list(
        [{name: row[name] for name in ("prompt", "image", "answer")} for row in rows]
    )
    assert isinstance(data.features["image"], datasets.Image)
    return data


@pytest.mark.long
@pytest.mark.parametrize(("make", "keys"), [(in_memory, {}), (as_dataset, {"image_key": "image"})])
def test_grpo_trains_on_images_in_memory(make: Any, keys: dict[str, Any], tmp_path: Path) -> None:
    model = write_model("qwen2_vl", tmp_path / "model")
    result = GRPO(
        model,
        make(),
        width,
        **{f"data.{name}": value for name, value in keys.items()},
        max_response_length=4,
        save_to=tmp_path / "run",
    ).fit(steps=1)
    assert result.metrics[-1]["critic/score/mean"] >= 1.0, "each row's reward saw its own image"


def test_sft_trains_on_images_in_memory(tmp_path: Path) -> None:
    model = write_model("qwen2_vl", tmp_path / "model")
    rows = [
        {
            "messages": [*row["prompt"], {"role": "assistant", "content": str(row["answer"])}],
            "images": row["images"],
        }
        for row in in_memory()
    ]
    result = SFT(model, rows, max_length=160, batch_size=3, save_to=tmp_path / "run").fit(steps=1)
    assert result.metrics[-1]["train/loss"] > 0


def test_a_row_with_too_many_images_is_named(tmp_path: Path) -> None:
    row = {"prompt": PARTS, "images": [picture(9, 9), picture(9, 9)]}
    with pytest.raises(ConfigError, match="prompts, row 1: it has 2 images, but only 1 places"):
        GRPO("model", [*in_memory()[:1], row], width, save_to=tmp_path / "run")
