"""vLLM samples with published classes as `docs/models.md` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import ROOT
from tests.workers.rollout.vllm.table import try_vllm

RESULTS: dict[str, list[str] | None] = json.loads((ROOT / "docs/data/models.json").read_text())
TRIED = [case for case, row in RESULTS.items() if row and len(row) > 5]
FAST = ("olmo", "qwen3_next", "cohere2", "ministral3", "idefics2")
"""A class that vLLM runs by the code of transformers, one that is rejected on CPUs, two whose
configuration is translated for vLLM, and one whose processor needs its tokenizer."""


def check(case: str, folder: Path) -> None:
    row = RESULTS[case]
    assert row is not None
    assert try_vllm(case, folder).partition(":")[0] == row[5]


@pytest.mark.vllm
@pytest.mark.parametrize("case", FAST)
def test_a_class_is_sampled_or_rejected(case: str, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in TRIED if case not in FAST])
def test_every_other_class_is_sampled_or_rejected(case: str, tmp_path: Path) -> None:
    check(case, tmp_path)
