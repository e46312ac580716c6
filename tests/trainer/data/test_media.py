"""Media in a row are read or rejected, by every recipe, and never left out without a word."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.workers.models.vision import picture, write_model
from trainer.data.config import DataConfig
from trainer.data.lm_rows import read_lm_rows
from trainer.data.media import ReadColumns, read_media
from trainer.data.pairs import read_labeled, read_pairs
from trainer.data.prompts import PromptSet, load_tokenizer
from verl_like.errors import ConfigError

COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
VALUES = ("absent", "null", "empty", "value")
MENTIONS = ("none", "marker", "marker in a part", "part", "part without media")
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A template that adds strings, like those of many text models."""


class Case(NamedTuple):
    column: str
    value: str
    mention: str

    @property
    def kind(self) -> str:
        return self.column.removesuffix("s")

    def row(self, file: str) -> dict[str, Any]:
        """Return a chat with this mention, and the column."""
        marker, text = f"<{self.kind}>", {"type": "text", "text": "What?"}
        content: Any = {
            "none": "What?",
            "marker": f"{marker}What?",
            "marker in a part": [{"type": "text", "text": f"{marker}What?"}],
            "part": [{"type": self.kind, self.kind: file}, text],
            "part without media": [{"type": self.kind}, text],
        }[self.mention]
        row: dict[str, Any] = {"chat": [{"role": "user", "content": content}]}
        if self.value != "absent":
            row[self.column] = {"null": None, "empty": [], "value": [file]}[self.value]
        return row

    def expected(self, has_eyes: bool) -> str:
        """Return what a reader does with the row: "read" an image, "text" or "rejected"."""
        if "part" in (self.mention, self.mention.partition(" without")[0]):
            is_read = has_eyes and self.kind == "image"
            one_image = (self.value == "value") == (self.mention == "part without media")
            return "read" if is_read and one_image else "rejected"
        if self.value == "value":
            return "read" if has_eyes and self.kind == "image" else "rejected"
        if self.mention == "none":
            return "text"
        if self.value == "absent":  # it is a word, unless the model could mean an image
            return "rejected" if has_eyes and self.mention == "marker" else "text"
        return "rejected"


Outcome = tuple[Sequence[int], Sequence[Any]]
"""The tokens of a row, and its images."""
Read = Callable[[dict[str, Any], Path, Any], Outcome]
ANSWER = [{"role": "assistant", "content": "a"}]
OTHER = [{"role": "assistant", "content": "b"}]


def prompts(row: dict[str, Any], file: Path, tokenizer: Any) -> Outcome:
    write(file, row)
    config = DataConfig(train_files=str(file), train_batch_size=1, max_prompt_length=99)
    data = PromptSet(config, "train_files", tokenizer, needs_rules=False)
    (batch,) = data.in_order()
    return batch.padded("input_ids")[0].tolist(), batch.non_tensor_batch.get("images", [()])[0]


def lm_rows(row: dict[str, Any], file: Path, tokenizer: Any) -> Outcome:
    write(file, row)
    (read,) = read_lm_rows("data.train_files", str(file), tokenizer, max_length=99)
    return read.ids.tolist(), read.images


def pairs(row: dict[str, Any], file: Path, tokenizer: Any) -> Outcome:
    write(file, row)
    (read,) = read_pairs("data.train_files", str(file), tokenizer, 99)
    assert read.rejected.images == read.chosen.images
    return read.chosen.ids.tolist(), read.images


def labeled(row: dict[str, Any], file: Path, tokenizer: Any) -> Outcome:
    write(file, row, {"prompt": "a", "completion": "b", "label": False})
    read, *_ = read_labeled("data.train_files", str(file), tokenizer, 99, seed=0)
    return read.response.ids.tolist(), read.images


def write(file: Path, *rows: dict[str, Any]) -> None:
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


RECIPES: dict[str, tuple[Read, Callable[[Any], dict[str, Any]]]] = {
    "prompts": (prompts, lambda chat: {"prompt": chat}),
    "messages": (lm_rows, lambda chat: {"messages": chat + ANSWER}),
    "response": (lm_rows, lambda chat: {"prompt": chat, "response": "a"}),
    "completion": (lm_rows, lambda chat: {"prompt": chat, "completion": ANSWER}),
    "pairs": (pairs, lambda chat: {"prompt": chat, "chosen": ANSWER, "rejected": OTHER}),
    "pairs of texts": (pairs, lambda chat: {"prompt": chat, "chosen": "a", "rejected": "b"}),
    "pairs of chats": (pairs, lambda chat: {"chosen": chat + ANSWER, "rejected": chat + OTHER}),
    "pairs and messages": (
        pairs,
        lambda chat: {"prompt": chat, "chosen": "a", "rejected": "b", "messages": chat + ANSWER},
    ),
    "labels": (labeled, lambda chat: {"prompt": chat, "completion": ANSWER, "label": True}),
    "labeled pairs": (labeled, lambda chat: {"prompt": chat, "chosen": "a", "rejected": "b"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a picture, a model that reads images, and one that reads text."""
    folder = tmp_path_factory.mktemp("media")
    write_model("qwen2_vl", folder / "eyes")
    load_tokenizer(str(folder / "eyes")).save_pretrained(folder / "text")
    (folder / "text" / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    (folder / "text" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    picture(20, 30).save(folder / "picture.png")
    return folder


@pytest.mark.parametrize("has_eyes", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_mention_of_media_is_read_or_rejected(
    recipe: str, has_eyes: bool, folder: Path, tmp_path: Path
) -> None:
    read, columns = RECIPES[recipe]
    tokenizer = load_tokenizer(str(folder / ("eyes" if has_eyes else "text")))
    wrong = {}
    for case in itertools.starmap(Case, itertools.product(COLUMNS, VALUES, MENTIONS)):
        row = case.row(str(folder / "picture.png"))
        row |= columns(row.pop("chat"))
        try:
            ids, images = read(row, tmp_path / "rows.jsonl", tokenizer)
        except ConfigError as error:
            text = str(error)
            outcome = "rejected" if case.kind in text and "rows.jsonl" in text else text
            assert "concatenate" not in text
        else:
            text = tokenizer.decode(ids)
            is_whole = case.mention.startswith("marker") == (f"<{case.kind}>" in text)
            outcome = "read" if images else "text"
            if images and "<|image_pad|>" not in text or not images and not is_whole:
                outcome = f"{outcome} as {text}"
        if outcome != case.expected(has_eyes):
            wrong[case] = outcome
    assert not wrong


@pytest.mark.parametrize("image_key", ["photo", "images", "image"])
def test_the_key_names_a_column_next_to_the_usual_ones(image_key: str, folder: Path) -> None:
    chat = [{"role": "user", "content": "What?"}]
    path, read = str(folder / "picture.png"), ReadColumns(["prompt"])
    for column in {image_key, "images", "image"}:
        row, refs = read_media({"prompt": chat, column: path}, read, [Path()], image_key=image_key)
        assert (len(refs), row.keys()) == (1, {"prompt"})
        others = {"images", "image"} - {column}
        for other in others:
            row = {"prompt": chat, column: path, other: path}
            with pytest.raises(ValueError, match="it has images in the columns"):
                read_media(row, read, [Path()], image_key=image_key)


def test_without_a_key_columns_and_markers_of_images_are_left_out(folder: Path) -> None:
    path = str(folder / "picture.png")
    row = {"prompt": [{"role": "user", "content": "<image>?"}], "images": [path]}
    options: dict[str, Any] = {"image_key": None, "model": str(folder / "eyes")}
    assert read_media(row, ReadColumns(["prompt"]), [], **options) == (row, ())
    with pytest.raises(ValueError, match="only texts and images are read, no video"):
        read_media(row | {"videos": ["a.mp4"]}, ReadColumns(["prompt"]), [], **options)


@pytest.mark.parametrize("value", [[], None])
def test_a_marker_in_a_text_without_messages_needs_its_image(value: Any) -> None:
    for name in ("prompt", "text", "chosen"):
        row = {name: "<image>?", "images": value}
        with pytest.raises(ValueError, match=f"'{name}' contains <image>.* column 'images' is emp"):
            read_media(row, ReadColumns([name]), [])


def test_a_marker_in_a_response_is_rejected(folder: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "What?"}], "response": "<image>"}
    read = ReadColumns(["prompt"], ["response"])
    with pytest.raises(ValueError, match="'response' contains <image>: only the prompt has places"):
        read_media(row | {"images": [str(folder / "picture.png")]}, read, [])


def test_all_tokens_but_those_of_images_are_in_the_loss(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "eyes"))
    row = {"messages": [{"role": "user", "content": "What?"}, *ANSWER]}
    write(tmp_path / "rows.jsonl", row | {"image": str(folder / "picture.png")})
    (read,) = read_lm_rows(
        "data.train_files", str(tmp_path / "rows.jsonl"), tokenizer, 99, loss_on_all=True
    )
    assert len(read.images) == 1
    is_image = read.ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert is_image.any()
    assert (read.in_loss == ~is_image).all()
