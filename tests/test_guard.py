"""The speed guard: what its ratios compare, and when it fails."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.conftest import load


@pytest.fixture(scope="module")
def guard() -> ModuleType:
    return load("benchmarks/guard.py")


def times(ours: float, floor: float, slowest_floor: float | None = None) -> Any:
    return {"ours": [ours, 9 * ours], "floor": [floor, slowest_floor or floor]}


def test_a_ratio_above_the_limit_fails_after_three_tries(guard: ModuleType) -> None:
    row = guard.row_of("grpo", 2.0, lambda name: times(2.6, 1.0))
    assert (row["verdict"], row["tries"]) == ("SLOWER", 3)


def test_one_try_below_the_limit_passes(guard: ModuleType) -> None:
    tries = iter([times(2.6, 1.0), times(2.4, 1.0)])
    row = guard.row_of("grpo", 2.0, lambda name: next(tries))
    assert (row["ratio"], row["verdict"], row["tries"]) == (2.4, "ok", 2)


def test_a_floor_that_varies_too_much_is_a_warning(guard: ModuleType) -> None:
    row = guard.row_of("grpo", 2.0, lambda name: times(2.6, 1.0, slowest_floor=2.1))
    assert row["verdict"] == "LOADED"


def test_the_floor_of_training_multiplies_every_matrix_three_times(guard: ModuleType) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 5)
            self.head = torch.nn.Linear(5, 7)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embedding

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

    with torch.profiler.profile(record_shapes=True) as trace:
        guard.products(Model(), num_tokens=11, num_reads=3, trains=True)()
    shapes = [event.input_shapes[:2] for event in trace.events() if event.name == "aten::mm"]
    assert shapes == [
        [[11, 4], [4, 5]], [[11, 5], [5, 4]], [[5, 11], [11, 4]],
        [[3, 5], [5, 7]], [[3, 7], [7, 5]], [[7, 3], [3, 5]],
    ]  # fmt: skip


def test_every_measure_has_a_recorded_ratio(guard: ModuleType) -> None:
    recorded = guard.json.loads(guard.RECORD.read_text("utf-8"))
    assert recorded.keys() == guard.MEASURES.keys()
    assert all(ratio > 1 for ratio in recorded.values())
