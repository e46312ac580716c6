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
import torch
from PIL import Image, ImageDraw

COLOURS = {"red": "#d33", "green": "#2a2", "blue": "#33d", "yellow": "#dc0"}
SHAPES = ("circle", "square", "triangle")
SIZE, PATCH = 32, 8
SPECIAL = (
    *("<pad>", "<eos>", "<unk>", "<user>", "<assistant>"),
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
)
WORDS = ("What", "is", "this", "?", *COLOURS, *SHAPES)
TEMPLATE = (
    "{% for message in messages %}{{ '<user>' if message.role == 'user' else '<assistant>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' "
    "if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ eos_token if message.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def draw(colour: str, shape: str, rng: random.Random) -> Image.Image:
    """Return a picture of the shape, at a random place and in a random size."""
    picture = Image.new("RGB", (SIZE, SIZE), "white")
    pencil, size = ImageDraw.Draw(picture), rng.randint(22, 28)
    left, top = rng.randint(1, SIZE - size - 1), rng.randint(1, SIZE - size - 1)
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
        chat_template=TEMPLATE,
    )
    tokenizer.add_tokens(list(SPECIAL[3:]), special_tokens=True)
    return tokenizer


def write_model(folder: Path) -> None:
    """Write a Qwen2-VL of 0.2 million random weights, with its tokenizer and image processor."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer()
    ids = {token: number for number, token in enumerate(SPECIAL)}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "num_heads": 4,
            "mlp_ratio": 2,
            "hidden_size": 64,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"shortest_edge": SIZE * SIZE, "longest_edge": SIZE * SIZE}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, size=sizes).save_pretrained(folder)


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


def write_sheet(file: Path, count: int = 6, side: int = 3 * SIZE) -> None:
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
    write_model(folder / "model")
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
