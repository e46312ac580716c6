"""Large columns are copied into reused blocks of memory, and equal torch's copies."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from verl_like.batch import memory
from verl_like.batch.memory import STEP_BYTES, BlockCache, copy_column, join_rows


@pytest.fixture(autouse=True)
def every_column_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGE_BYTES", 1)
    monkeypatch.setattr(memory, "UNKEPT_BYTES", 1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool, torch.uint8])
@pytest.mark.parametrize("layout", ["plain", "transposed", "no rows", "one dim"])
def test_copies_and_joins_have_the_rows_of_torch(dtype: torch.dtype, layout: str) -> None:
    plain = torch.arange(12).reshape(4, 3).to(dtype)
    layouts = {"plain": plain, "transposed": plain.T, "no rows": plain[:0], "one dim": plain[:, 1]}
    column = layouts[layout]
    for result, expected in (
        (copy_column(column), column),
        (join_rows([column, column]), torch.cat([column, column])),
        (join_rows([column, column], keeps=False), torch.cat([column, column])),
    ):
        assert result.dtype == dtype
        assert torch.equal(result, expected)
        if len(result):
            assert result.untyped_storage().data_ptr() != column.untyped_storage().data_ptr()


def test_copies_and_joins_pass_gradients() -> None:
    column = torch.ones(2, 3, requires_grad=True)
    join_rows([torch.zeros(1, 3), copy_column(column), column]).sum().backward()
    assert column.grad is not None
    assert column.grad.tolist() == [[2.0] * 3] * 2


def test_a_block_is_reused_once_its_column_is_unreferenced() -> None:
    column = torch.arange(STEP_BYTES)
    first = copy_column(column)
    place = first.data_ptr()
    row_of_first = first[5:6].view(1, 1).numpy()
    del first
    gc.collect()
    second = copy_column(column + 1)
    assert second.data_ptr() != place, "a row of the first column is still in use"
    assert row_of_first.item() == 5
    del row_of_first
    gc.collect()
    third = copy_column(column + 2)
    assert third.data_ptr() == place
    assert torch.equal(second, column + 1)
    assert torch.equal(third, column + 2)


def test_a_cache_keeps_a_limit_and_lends_blocks_that_fit() -> None:
    cache = BlockCache(kept_bytes=3 * STEP_BYTES)
    lent = [cache.lend(STEP_BYTES) for _ in range(5)]
    assert cache.unused_bytes() == 0
    lent.clear()
    assert cache.unused_bytes() == 3 * STEP_BYTES
    small = cache.lend(10)
    assert small.nbytes == 10
    assert cache.unused_bytes() == 2 * STEP_BYTES
    large = cache.lend(4 * STEP_BYTES)
    assert cache.unused_bytes() == 2 * STEP_BYTES, "no unused block is large enough"
    assert large.nbytes == 4 * STEP_BYTES
    del large
    assert cache.unused_bytes() <= 3 * STEP_BYTES


def test_threads_never_share_a_block() -> None:
    cache = BlockCache()

    def use(number: int) -> None:
        for _ in range(300):
            lent = cache.lend(64)
            lent[:] = number
            other = cache.lend(64)
            other[:] = 255
            assert (lent == number).all()
            del lent, other

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
