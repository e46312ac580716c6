"""Images have the tokens and pixels of transformers, and each process decodes them once."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.models.test_image_input import Case, make_case
from tests.workers.models.vision import CASES, FAMILIES, picture, write_model
from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import ConfigError
from workers.images import ImageRef, image_ref, open_image
from workers.models import images
from workers.models.images import ImageInput


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case("qwen2_vl", tmp_path)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of times that each file is decoded."""
    counts: Counter[str] = Counter()

    def count(ref: ImageRef, row: str = "") -> Any:
        counts[ref.path] += 1
        return open_image(ref)

    monkeypatch.setattr(images, "open_image", count)
    return counts


def read_all(case: Case, num_samples: int, num_passes: int) -> list[dict[str, torch.Tensor]]:
    """Return the arguments of passes over each sample of every row."""
    rows = [torch.tensor(row) for row in case.rows for _ in range(num_samples)]
    refs = [refs for refs in case.refs for _ in range(num_samples)]
    width = max(map(len, rows))
    columns = {
        "input_ids": RaggedTensor.from_rows(rows, width),
        "position_ids": RaggedTensor.from_rows([torch.arange(len(row)) for row in rows], width),
    }
    read = ImageInput(case.module, case.reader)
    arguments = []
    for _ in range(num_passes):
        numbers = read.of_rows(columns, refs, ["a row"] * len(rows)).rows()
        arguments += [
            read.arguments({"input_ids": row}, of_row, torch.device("cpu"))
            for row, of_row in zip(rows, numbers, strict=True)
        ]
    return arguments


def test_an_image_is_decoded_once_for_all_samples_and_passes(
    case: Case, decoded: Counter[str]
) -> None:
    read_all(case, num_samples=8, num_passes=2)
    distinct = {ref.path for refs in case.refs for ref in refs}
    assert decoded == dict.fromkeys(distinct, 1)


def test_images_that_do_not_fit_into_the_cache_have_the_same_tensors(
    case: Case, decoded: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_all(case, num_samples=1, num_passes=1)
    case.reader._inputs.clear()
    monkeypatch.setattr(images, "CACHE_BYTES", 1)
    for ours, theirs in zip(read_all(case, 1, 1), expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in ours)
    assert len(case.reader._inputs) == 1


def test_damage_that_only_decoding_finds_names_the_file_and_the_row(
    case: Case, tmp_path: Path
) -> None:
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", 40, 40, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(bytes(40 * 121))[:-20],
        b"IEND": b"",
    }
    path = tmp_path / "short.png"
    chunks = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts.items()
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    ref = image_ref(path)
    with pytest.raises(ConfigError, match=rf"^row 7: the image {path} is damaged: .*the row\.$"):
        case.reader.load([(case.refs[0], "row 6"), ([ref], "row 7")])


@pytest.mark.parametrize("family", CASES)
def test_images_have_the_pixels_and_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    processor = FAMILIES[family]()[1]
    reader = images.ImageReader(str(write_model(family, tmp_path)))
    for number, size in enumerate([(40, 70), (333, 20), (64, 64)]):
        picture(*size, seed=number).save(tmp_path / f"{number}.png")
        ref = image_ref(tmp_path / f"{number}.png")
        text = reader.expanded(reader.placeholder, [ref])  # before any pixels are read
        theirs = processor(images=[[open_image(ref)]], text=reader.placeholder, return_tensors="pt")
        ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == theirs["input_ids"][0].tolist()
        pixels = theirs["pixel_values"]
        assert reader.inputs([ref])["pixel_values"].flatten().equal(pixels.flatten())
