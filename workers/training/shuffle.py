"""Mini-batches with other samples in every epoch of an update: `actor.shuffle`.

The position of a sample in the batch depends on the number of ranks, since ranks are balanced by
tokens. So the driver numbers the samples before balancing (`sample_number`), and an order is a
permutation of these numbers: the mini-batches contain the same samples at every number of ranks.
The order follows from the seed, the update call and the epoch, so no state has to be saved.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from verl_like.errors import BatchError
from workers.training.microbatch import Rows

SAMPLE_NUMBER = "sample_number"


def epoch_rows(rows: Rows, epochs: int, seed: int | None, update_call: int) -> list[Rows]:
    """Return the rows of each epoch of an update; without a seed all epochs are the same.

    Mini-batch k of K contains the samples whose position is k mod K.
    """
    if seed is None:
        return [rows] * epochs

    numbers = rows.columns[SAMPLE_NUMBER]
    if len(numbers) and int(numbers.max()) >= rows.total:
        raise BatchError(
            f"{SAMPLE_NUMBER} {int(numbers.max())} in a batch of {rows.total} samples: some were "
            "taken out after the driver numbered them. Number them again, from 0."
        )
    orders = []
    for epoch in range(epochs):
        generator = np.random.default_rng([seed, update_call, epoch])
        places = torch.from_numpy(generator.permutation(rows.total))
        orders.append(replace(rows, places=places[numbers]))
    return orders
