"""Draw coloured shapes, and write a tiny Qwen2-VL that has not learned to see yet.

    python examples/shapes/make.py FOLDER
    python examples/shapes/make.py --sheet FILE.png   # the first six validation pictures, enlarged

FOLDER gets `model`, `sft.parquet` (messages, for SFT), `train.parquet` and `val.parquet` (prompts,
for GRPO), and `pictures`. Nothing is downloaded.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from verl_like.tiny import write_vision_model

COLOURS = {"red": "#d33", "green": "#2a2", "blue": "#33d", "yellow": "#dc0"}
SHAPES = ("circle", "square", "triangle")
SIDE = 32
SPECIAL = (
    *("<pad>", "<eos>", "<unk>", "<user>", "<assistant>"),
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
)
WORDS = ("What", "is", "this", "?", *COLOURS, *SHAPES)


def draw(colour: str, shape: str, rng: random.Random) -> Image.Image:
    """Return a picture of the shape, at a random place and in a random size."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pencil, size = ImageDraw.Draw(picture), rng.randint(22, 28)
    left, top = rng.randint(1, SIDE - size - 1), rng.randint(1, SIDE - size - 1)
    right, bottom = left + size, top + size
    if shape == "circle":
        pencil.ellipse((left, top, right, bottom), fill=COLOURS[colour])
    elif shape == "square":
        pencil.rectangle((left, top, right, bottom), fill=COLOURS[colour])
    else:
        corners = [(left, bottom), (right, bottom), ((left + right) // 2, top)]
        pencil.polygon(corners, fill=COLOURS[colour])
    return picture


def make_tokenizer() -> Any:
    """Return a tokenizer with a token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: number for number, token in enumerate((*SPECIAL, *WORDS))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    tokenizer.add_tokens(list(SPECIAL[3:5]), special_tokens=True)
    return tokenizer


def draw_split(split: str, count: int) -> Iterator[tuple[Image.Image, str]]:
    """Yield the first pictures of a split, with their answers."""
    rng = random.Random(split)
    for _ in range(count):
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        yield draw(colour, shape, rng), f"{colour} {shape}"


def make_rows(folder: Path, split: str, count: int) -> list[dict[str, Any]]:
    """Draw pictures into the folder; return rows with their paths, in verl's schema."""
    rows = []
    for number, (picture, answer) in enumerate(draw_split(split, count)):
        name = f"pictures/{split}_{number}.png"
        picture.save(folder / name)
        rows.append(
            {
                "prompt": [{"role": "user", "content": "<image> What is this ?"}],
                "images": [name],
                "answer": answer,
            }
        )
    return rows


def write_sheet(file: Path, count: int = 6, side: int = 3 * SIDE) -> None:
    """Write the first validation pictures next to each other, enlarged."""
    sheet = Image.new("RGB", (count * (side + 4) + 4, side + 8), "#888")
    for number, (picture, _) in enumerate(draw_split("val", count)):
        sheet.paste(
            picture.resize((side, side), Image.Resampling.NEAREST), (number * (side + 4) + 4, 4)
        )
    sheet.save(file, optimize=True)


def main(folder: Path) -> None:
    """Write the model and the data."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    write_vision_model(folder / "model", make_tokenizer())
    lessons = [
        {
            "messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}],
            "images": row["images"],
        }
        for row in make_rows(folder, "sft", 1200)
    ]
    pq.write_table(pa.Table.from_pylist(lessons), folder / "sft.parquet")
    for split, count in (("train", 600), ("val", 200)):
        rows = make_rows(folder, split, count)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


if __name__ == "__main__":
    if sys.argv[1] == "--sheet":
        write_sheet(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
