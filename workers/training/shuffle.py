"""Mini-batches of other samples in every pass over the batch: `actor.shuffle`.

Where a sample lies in the batch depends on the number of ranks, since ranks are balanced by tokens.
So the driver numbers the samples before that (`sample_number`), and an order is a permutation of
these numbers: the mini-batches are the same samples at every number of ranks. Nothing of it has to
be saved: seed, update call and pass give the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from verl_like.errors import BatchError
from workers.training.microbatch import Rows

SAMPLE_NUMBER = "sample_number"


def order_of_samples(total: int, seed: int, update_call: int, epoch: int) -> np.ndarray:
    """The place of every sample in one pass over the batch: mini-batch k of K has those k mod K."""
    return np.random.default_rng([seed, update_call, epoch]).permutation(total)


def order_columns(seed: int | None) -> tuple[str, ...]:
    """The columns that `passes_over` reads."""
    return () if seed is None else (SAMPLE_NUMBER,)


def passes_over(rows: Rows, epochs: int, seed: int | None, update_call: int) -> Iterator[Rows]:
    """The rows for every pass of an update over the batch; without a seed always the same."""
    if seed is None:
        yield from [rows] * epochs
        return

    numbers = rows.columns[SAMPLE_NUMBER]
    if len(numbers) and int(numbers.max()) >= rows.total:
        raise BatchError(
            f"{SAMPLE_NUMBER} {int(numbers.max())} in a batch of {rows.total} samples: some were "
            "taken out after the driver numbered them. Number them anew, from 0."
        )
    for epoch in range(epochs):
        places = torch.from_numpy(order_of_samples(rows.total, seed, update_call, epoch))
        yield replace(rows, places=places[numbers])
