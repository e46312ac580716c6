"""The predicted memory of a role, next to the bytes of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import load
from tests.workers.kept_ranks import run_kept


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    load("benchmarks/memory_side.py").make_models(folder)
    return folder


def found_by_a_rank(folder: Path, name: str) -> dict[str, Any]:
    side = load("benchmarks/memory_side.py")
    side.ROWS_AT_ONCE = 2
    return side.compared(str(folder), side.CASES[name])


@pytest.mark.parametrize(
    "name",
    [
        "LoRA actor, recomputed, head in chunks",
        "DPO",
        "actor, 2 ranks",
    ],
)
def test_a_role_takes_the_bytes_that_are_predicted(models: Path, name: str) -> None:
    num_ranks = 2 if "2 ranks" in name else 1
    for found in run_kept(num_ranks, found_by_a_rank, models, name):
        for part in ("kept", "call"):
            both = found[part]
            assert both["measured"] > 2**22
            assert both["predicted"] == pytest.approx(both["measured"], rel=0.1), (part, found)
