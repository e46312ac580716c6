"""Each process decodes an image once, whatever the number of samples and passes that read it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.models.test_image_input import Case, make_case
from verl_like.batch.ragged import RaggedTensor
from workers.images import ImageRef, opened
from workers.models import images
from workers.models.image_input import ImageInput


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return make_case("qwen2_vl", tmp_path)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of times that each file is decoded."""
    counts: Counter[str] = Counter()

    def count(ref: ImageRef) -> Any:
        counts[ref.path] += 1
        return opened(ref)

    monkeypatch.setattr(images, "opened", count)
    return counts


def read_all(case: Case, num_samples: int, num_passes: int) -> list[dict[str, torch.Tensor]]:
    """Return the arguments of passes over each sample of every row."""
    rows = [torch.tensor(row) for row in case.rows for _ in range(num_samples)]
    refs = [refs for refs in case.refs for _ in range(num_samples)]
    ids = RaggedTensor.from_rows(rows, max(map(len, rows)))
    read = ImageInput(case.module, case.reader)
    arguments = []
    for _ in range(num_passes):
        numbers = read.of_rows(ids, refs, ["a row"] * len(rows)).rows()
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
