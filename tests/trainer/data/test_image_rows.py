"""Rows with images become tokens as the processor of transformers writes them, or are rejected."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.workers.models.vision import FAMILIES, picture, write_model
from trainer.data.config import DataConfig
from trainer.data.lm_rows import read_lm_rows
from trainer.data.pairs import read_pairs
from trainer.data.prompts import PromptSet, load_tokenizer
from verl_like.errors import ConfigError
from workers.images import ImageRef, image_ref
from workers.models.images import ImageReader

SIZES = ((40, 70), (90, 30), (33, 33))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a model and pictures."""
    folder = tmp_path_factory.mktemp("images")
    write_model("qwen2_vl", folder / "model")
    for number, size in enumerate(SIZES):
        picture(*size, seed=number).save(folder / f"{number}.png")
    return folder


def prompts_of(folder: Path, file: Path, row: dict[str, Any], **settings: Any) -> PromptSet:
    row["images"] = [str(folder / name) for name in row["images"]]
    file.write_text(json.dumps(row), encoding="utf-8")
    config = DataConfig(train_files=str(file), train_batch_size=1, **settings)
    return PromptSet(config, "train_files", load_tokenizer(f"{folder}/model"), needs_rules=False)


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (["0.png"], "<image>What is this?"),
        (["0.png", "0.png", "0.png"], "<image>Is it<image>the same<image>?"),
        (["0.png", "1.png"], "<image><image>Compare."),
        (["1.png", "0.png", "2.png"], "Compare <image><image><image>"),
        (["0.png", "2.png"], "no place for them"),
    ],
)
def test_images_have_the_tokens_and_pixels_of_transformers(
    images: list[str], text: str, folder: Path, tmp_path: Path
) -> None:
    row = {"prompt": [{"role": "user", "content": text}], "images": images}
    prompts = prompts_of(folder, tmp_path / "rows.jsonl", row, max_prompt_length=256)
    (batch,) = prompts.in_order()

    processor = FAMILIES["qwen2_vl"]()[1]
    token = processor.image_token
    place = f"<|vision_start|>{token}<|vision_end|>"
    content = text.replace("<image>", place) if "<image>" in text else place * 2 + text
    theirs = processor(
        images=[Image.open(folder / name) for name in images],
        text=[f"<|user|>{content}<|end|><|assistant|>"],
        return_tensors="pt",
    )
    assert batch.padded("input_ids")[0].tolist()[-theirs["input_ids"].shape[1] :] == (
        theirs["input_ids"][0].tolist()
    )
    refs = batch.non_tensor_batch["images"][0]
    assert [Path(path).name for path, *_ in refs] == images
    ours = ImageReader(f"{folder}/model").inputs([ImageRef(*ref) for ref in refs])
    assert ours["pixel_values"].equal(theirs["pixel_values"])
    assert ours["image_grid_thw"].equal(theirs["image_grid_thw"])


def test_the_driver_reads_the_size_of_an_image_from_its_check(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_image(ref: ImageRef, row: str = "") -> None:
        raise AssertionError(f"{ref.path} is decoded again")

    monkeypatch.setattr("workers.models.images.open_image", open_image)
    row = {"prompt": [{"role": "user", "content": "<image><image>?"}], "images": ["0.png", "2.png"]}
    (batch,) = prompts_of(folder, tmp_path / "rows.jsonl", row, max_prompt_length=256).in_order()
    assert [ref[2:] for ref in batch.non_tensor_batch["images"][0]] == [SIZES[0], SIZES[2]]


@pytest.mark.parametrize("truncation", ["error", "left", "right"])
def test_an_image_longer_than_the_limit_is_rejected_without_advice_to_truncate(
    truncation: str, folder: Path, tmp_path: Path
) -> None:
    row = {"prompt": [{"role": "user", "content": "<image>"}], "images": ["0.png"]}
    limit = {"max_prompt_length": 8, "truncation": truncation}
    with pytest.raises(ConfigError, match=r"the prompt has \d+ tokens, .*data.max_pro") as caught:
        prompts_of(folder, tmp_path / "rows.jsonl", row, **limit)
    assert "data.filter_overlong_prompts=true." in str(caught.value)
    assert "data.truncation" not in str(caught.value)

    short = prompts_of(folder, tmp_path / "rows.jsonl", row, **limit, filter_overlong_prompts=True)
    assert (len(short), short.num_overlong) == (0, 1)


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_text_longer_than_the_limit_may_be_truncated(
    is_cached: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("trainer.data.prompt_table.CACHED_FROM_BYTES", 0 if is_cached else 2**30)
    data = base64.b64encode((folder / "2.png").read_bytes()).decode()
    image = {"url": f"data:image/png;base64,{data}"}
    rows = [
        {"prompt": [{"role": "user", "content": "a text" * 50}], "images": []},
        {"prompt": [{"role": "user", "content": "<image>"}], "images": [image]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def read(limit: int, truncation: str) -> PromptSet:
        settings: dict[str, Any] = {"max_prompt_length": limit, "truncation": truncation}
        config = DataConfig(train_files=str(path), **settings)
        tokenizer = load_tokenizer(f"{folder}/model")
        return PromptSet(config, "train_files", tokenizer, needs_rules=False)

    assert read(500, "error").num_truncated == 0
    assert read(40, "left").num_truncated == 1
    with pytest.raises(ConfigError, match="or data.truncation=left|right"):
        read(40, "error")
    with pytest.raises(ConfigError, match=r"(line 2|row 1): the prompt has 9 tokens"):
        read(8, "left")


def test_images_of_messages_that_are_no_objects_are_bad_rows(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 1: .*no message of the user"):
        prompts_of(folder, tmp_path / "rows.jsonl", {"prompt": ["a text"], "images": ["0.png"]})


@pytest.mark.parametrize(
    ("name", "words"),
    [("empty.png", "it is empty"), (".", "Is a directory"), ("text.txt", "cannot identify")],
)
@pytest.mark.parametrize("kind", ["prompts", "rows"])
def test_a_bad_image_is_named_with_file_and_line(
    kind: str, name: str, words: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.txt").write_text("text")
    chat = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a"}]
    good = {"prompt": chat[:1], "messages": chat, "images": [str(folder / "0.png")]}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(good | {'images': [name]})}\n")
    tokenizer = load_tokenizer(f"{folder}/model")
    config = DataConfig(train_files=str(path), max_prompt_length=256)
    read = {
        "prompts": lambda: PromptSet(config, "train_files", tokenizer, needs_rules=False),
        "rows": lambda: read_lm_rows("data.train_files", str(path), tokenizer, max_length=256),
    }[kind]
    with pytest.raises(ConfigError, match=rf"rows.jsonl, line 2: .*{words}"):
        read()


@pytest.mark.parametrize("images", [["0.png", "2.png"], ["1.png"]])
@pytest.mark.parametrize("in_parts", [True, False])
def test_a_pair_without_prompt_is_the_pair_with_its_prompt(
    images: list[str], in_parts: bool, folder: Path, tmp_path: Path
) -> None:
    paths = [str(folder / name) for name in images]
    parts = [{"type": "image", **({"image": path} if in_parts else {})} for path in paths]
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    column = {} if in_parts else {"images": paths}
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("red", "a ball"))
    rows = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected, **column},
        {"chosen": prompt + chosen, "rejected": prompt + rejected, **column},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    tokenizer = load_tokenizer(str(folder / "model"))
    with_prompt, without = read_pairs("data.train_files", [str(file)], tokenizer, 512)
    assert [ref.sha for ref in with_prompt.images] == [image_ref(path).sha for path in paths]
    assert without.images == with_prompt.images
    for ours, expected in zip(without.sides.values(), with_prompt.sides.values(), strict=True):
        assert ours.ids.tolist() == expected.ids.tolist()
        assert ours.in_loss.tolist() == expected.in_loss.tolist()
        assert ours.images == expected.images


def test_a_pair_whose_sides_have_other_images_is_rejected(folder: Path, tmp_path: Path) -> None:
    sides = {
        side: [
            {"role": "user", "content": [{"type": "image", "image": str(folder / name)}]},
            {"role": "assistant", "content": side},
        ]
        for side, name in (("chosen", "0.png"), ("rejected", "1.png"))
    }
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(sides), encoding="utf-8")
    tokenizer = load_tokenizer(str(folder / "model"))
    words = "pairs.jsonl.*the images of 'chosen' .*0.png.* differ from those of 'rejected' .*1.png"
    with pytest.raises(ConfigError, match=words):
        read_pairs("data.train_files", [str(file)], tokenizer, 512)
