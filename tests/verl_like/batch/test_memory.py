"""Copies and concatenations on huge pages hold what torch would put there."""

from __future__ import annotations

import pytest
import torch

from verl_like.batch import memory
from verl_like.batch.memory import copy_of, join_rows


@pytest.fixture(autouse=True)
def every_column_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGE_BYTES", 1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool, torch.uint8])
@pytest.mark.parametrize("layout", ["plain", "transposed", "no rows", "one dim"])
def test_the_rows_are_those_of_torch(dtype: torch.dtype, layout: str) -> None:
    plain = torch.arange(12).reshape(4, 3).to(dtype)
    layouts = {"plain": plain, "transposed": plain.T, "no rows": plain[:0], "one dim": plain[:, 1]}
    column = layouts[layout]
    for made, expected in (
        (copy_of(column), column),
        (join_rows([column, column]), torch.cat([column, column])),
    ):
        assert made.dtype == dtype
        assert torch.equal(made, expected)
        if len(made):
            assert made.untyped_storage().data_ptr() != column.untyped_storage().data_ptr()


def test_a_gradient_goes_through() -> None:
    column = torch.ones(2, 3, requires_grad=True)
    join_rows([torch.zeros(1, 3), copy_of(column), column]).sum().backward()
    assert column.grad is not None
    assert column.grad.tolist() == [[2.0] * 3] * 2
