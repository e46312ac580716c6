"""Which rank of the actor gets which rows: as even in tokens as whole rows allow.

W ranks get W contiguous pieces of the batch, and mini-batch k of K is the rows whose number leaves
k when divided by K. So rows change places only with rows of their own mini-batch: every optimizer
step has the samples that it had, and its ranks are done at about the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verl_like.tensor_ops import get_seqlen_balanced_partitions
from workers.columns import count_ones

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto


def balance_ranks(
    batch: DataProto, num_ranks: int, num_mini_batches: int
) -> tuple[DataProto, dict[str, float]]:
    """The batch with its rows in the better order, and tokens of a rank (`global_seqlen/...`).

    The batch stays as it is where the rows do not come out even over ranks and mini-batches, and
    where nothing is gained.
    """
    lengths = count_ones(batch, "attention_mask").numpy()
    before = after = _tokens_of_ranks(lengths, num_ranks)
    if num_ranks > 1 and len(batch) % (num_ranks * num_mini_batches) == 0:
        order = balanced_order(lengths, num_ranks, num_mini_batches)
        waits = [_slowest(rows, num_ranks, num_mini_batches) for rows in (lengths, lengths[order])]
        if waits[1] < waits[0]:
            batch, after = batch.reorder(order), _tokens_of_ranks(lengths[order], num_ranks)
    return batch, {
        "global_seqlen/min": float(before.min()),
        "global_seqlen/max": float(before.max()),
        "global_seqlen/minmax_diff": float(before.max() - before.min()),
        "global_seqlen/balanced_min": float(after.min()),
        "global_seqlen/balanced_max": float(after.max()),
        "global_seqlen/mean": float(lengths.sum() / num_ranks),
    }


def balanced_order(lengths: np.ndarray, num_ranks: int, num_mini_batches: int) -> np.ndarray:
    """Row numbers in the new order; ranks and mini-batches divide the rows."""
    places = np.arange(len(lengths)).reshape(num_ranks, -1)
    order = np.empty_like(places)
    for index in range(num_mini_batches):
        of_mini_batch = places % num_mini_batches == index
        rows = places[of_mini_batch]
        parts = get_seqlen_balanced_partitions(lengths[rows].tolist(), num_ranks, equal_size=True)
        order[of_mini_batch] = rows[np.concatenate(parts)]
    return order.ravel()


def _tokens_of_ranks(lengths: np.ndarray, num_ranks: int) -> np.ndarray:
    """Tokens of each rank's piece of the rows, as dispatch cuts them."""
    size = -(-len(lengths) // num_ranks)
    return np.asarray([lengths[rank * size : (rank + 1) * size].sum() for rank in range(num_ranks)])


def _slowest(lengths: np.ndarray, num_ranks: int, num_mini_batches: int) -> int:
    """Tokens of the fullest rank, for which a step's ranks wait in each mini-batch, added up."""
    return int(lengths.reshape(num_ranks, -1, num_mini_batches).sum(axis=1).max(axis=0).sum())
