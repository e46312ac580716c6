"""The order of an epoch: shuffled by the seed, or by a user's function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.data.test_prompts import make_config
from trainer.data.config import DataConfig
from trainer.data.loader import epoch_order
from trainer.data.prompts import PromptLoader
from verl_like.errors import ConfigError

CALLS = []


def backwards(num_prompts: int, epoch: int, seed: int) -> list[int]:
    CALLS.append((num_prompts, epoch, seed))
    return list(reversed(range(num_prompts)))


def too_few(num_prompts: int, epoch: int, seed: int) -> list[int]:
    return [0] * (num_prompts - 1)


def too_far(num_prompts: int, epoch: int, seed: int) -> list[int]:
    return list(range(1, num_prompts + 1))


def order_of(name: str) -> Any:
    return epoch_order(DataConfig(sampler=f"{__name__}.{name}"), 3, 4)


def test_a_user_s_order_is_computed_once_per_epoch() -> None:
    CALLS.clear()
    order = order_of("backwards")
    assert [order(epoch).tolist() for epoch in (0, 0, 1)] == [[3, 2, 1, 0]] * 3
    assert CALLS == [(4, 0, 3), (4, 1, 3)]


def test_a_shuffled_epoch_is_a_permutation_by_seed_and_epoch() -> None:
    order, same, other = (epoch_order(DataConfig(), seed, 50) for seed in (1, 1, 2))
    assert sorted(order(0)) == list(range(50))
    assert np.array_equal(order(0), same(0))
    assert not np.array_equal(order(0), order(1))
    assert not np.array_equal(order(0), other(0))
    assert epoch_order(DataConfig(shuffle=False), 1, 3)(5).tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["too_few", "too_far"])
def test_an_invalid_order_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} returned int64.*4 integers from 0 to 3"):
        order_of(name)(0)


def test_a_loader_takes_its_prompts_in_the_user_s_order(tiny_dir: Path, tokenizer: Any) -> None:
    data = {"train_batch_size": 4, "sampler": f"{__name__}.backwards"}
    loader = PromptLoader(make_config(tiny_dir / "val.parquet", **data), tokenizer)
    batch = next(iter(loader))
    assert batch.non_tensor_batch["uid"].tolist() == ["31-0", "30-0", "29-0", "28-0"]
