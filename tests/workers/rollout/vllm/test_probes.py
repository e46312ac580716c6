"""A weight checked by what its layer computes: rounding is let through, a change is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from workers.rollout.vllm.probes import Product, probes

ROWS, INPUTS = 96, 896


def weight_of(dtype: torch.dtype, inputs: int = INPUTS) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (0.02 * torch.randn((ROWS, inputs), generator=generator)).to(dtype)


def wrong_rows(sent: Tensor, held: Tensor) -> list[int]:
    found = linear(probes(sent.shape[1], sent.dtype), held)
    wrong = Product(sent).wrong_rows(found)
    return [] if wrong is None else wrong.nonzero().flatten().tolist()


@pytest.mark.parametrize("inputs", [1, 64, INPUTS, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_in_another_order_are_the_same_weight(dtype: torch.dtype, inputs: int) -> None:
    weight = weight_of(dtype, inputs)
    assert wrong_rows(weight, weight) == []
    product, vectors = Product(weight), probes(inputs, dtype).float()
    one_by_one = torch.zeros(len(vectors), ROWS)
    for column in range(inputs):
        one_by_one += vectors[:, column : column + 1] * weight[:, column].float()
    assert product.wrong_rows(one_by_one.to(dtype)) is None
    exact = vectors.double() @ weight.double().t()
    assert product.wrong_rows(exact.to(dtype)) is None


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 0.001), (torch.float16, 0.03), (torch.bfloat16, 0.25)]
)
def test_one_element_that_is_off_by_a_part_of_the_rows_mean_size_is_seen(
    dtype: torch.dtype, limit: float
) -> None:
    sent = weight_of(dtype)
    for seed in range(10):
        torch.manual_seed(seed)
        places = torch.randint(INPUTS, (ROWS, 1))
        off = limit * 0.02 * (torch.randint(2, (ROWS, 1)) * 2 - 1)
        held = sent.float().scatter_add(1, places, off).to(dtype)
        assert wrong_rows(sent, held) == list(range(ROWS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_zero_or_have_changed_places_are_seen(dtype: torch.dtype) -> None:
    sent = weight_of(dtype)
    held = sent.clone()
    held[3] = 0
    held[[7, 90]] = held[[90, 7]]
    assert wrong_rows(sent, held) == [3, 7, 90]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_that_have_changed_places_are_seen(dtype: torch.dtype) -> None:
    sent = weight_of(dtype, 64)
    held = sent.clone()
    held[:, [5, 6]] = held[:, [6, 5]]
    assert len(wrong_rows(sent, held)) > 0.9 * ROWS
    assert wrong_rows(sent, sent.flip(1)) == list(range(ROWS))


def test_what_came_broken_is_held_broken_and_hides_no_other_row() -> None:
    sent = weight_of(torch.float16)
    sent[1, 0], sent[2] = torch.nan, 60000.0
    sent[2, ::2] = -60000.0
    assert wrong_rows(sent, sent) == []
    held = sent.clone()
    held[1], held[4, 0] = 0, torch.inf
    assert wrong_rows(sent, held) == [1, 4]
