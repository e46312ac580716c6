"""Mini-batches of other samples in every pass over the batch: `actor.shuffle`.

Where a sample lies in the batch depends on the number of ranks, since ranks are balanced by tokens.
So the driver numbers the samples before that (`sample_number`), and an order is a permutation of
these numbers: the mini-batches are the same samples at every number of ranks. Nothing of it has to
be saved: seed, update call and pass give the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from verl_like.errors import BatchError
from workers.training.microbatch import MiniBatch, Rows, mini_batch

SAMPLE_NUMBER = "sample_number"
T = TypeVar("T")


def order_of_samples(total: int, seed: int, update_call: int, epoch: int) -> np.ndarray:
    """The place of every sample in one pass over the batch: mini-batch k of K has those k mod K."""
    return np.random.default_rng([seed, update_call, epoch]).permutation(total)


def order_columns(seed: int | None) -> tuple[str, ...]:
    """The columns that `passes_over` reads."""
    return () if seed is None else (SAMPLE_NUMBER,)


def passes_over(rows: Rows, epochs: int, seed: int | None, update_call: int) -> list[Rows]:
    """The rows for every pass of an update over the batch; without a seed always the same."""
    if seed is None:
        return [rows] * epochs

    numbers = rows.columns[SAMPLE_NUMBER]
    if len(numbers) and int(numbers.max()) >= rows.total:
        raise BatchError(
            f"{SAMPLE_NUMBER} {int(numbers.max())} in a batch of {rows.total} samples: some were "
            "taken out after the driver numbered them. Number them anew, from 0."
        )
    orders = []
    for epoch in range(epochs):
        places = torch.from_numpy(order_of_samples(rows.total, seed, update_call, epoch))
        orders.append(replace(rows, places=places[numbers]))
    return orders


def steps_over(
    orders: Sequence[Rows],
    count: int,
    beside: Sequence[tuple[Rows, T]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Iterator[tuple[MiniBatch, list[tuple[MiniBatch, T]]]]:
    """The mini-batch of every optimizer step, and the step's share of each batch `beside`.

    Every pass has `count` mini-batches; what stands beside, each with its loss, is passed over
    once, over all passes.
    """
    num_steps = len(orders) * count
    for number in range(num_steps):
        own = mini_batch(orders[number // count], number % count, count, group, device)
        more = []
        for rows, its_loss in beside:
            more.append((mini_batch(rows, number, num_steps, group, device), its_loss))
        yield own, more
