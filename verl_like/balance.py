"""Balancing of sequence lengths: rows cut into sets of nearly equal total length."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from verl_like.errors import BatchError

_Parts = list[tuple[int, list[int]]]
"""(Total length, rows) of each non-empty partition, heaviest first."""


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool = False
) -> list[list[int]]:
    """Divide rows into non-empty sets of nearly equal total length.

    Args:
        seqlen_list: length of each row.
        k_partitions: number of sets.
        equal_size: the sets also have equally many rows.

    Karmarkar and Karp's largest differencing method, "The differencing method of set partitioning"
    (UCB/CSD 82/113, 1982). The result depends only on the arguments: ties go to the lower row, rows
    ascend in a set, and sets ascend by their first row.
    """
    num_rows = len(seqlen_list)
    if not 1 <= k_partitions <= num_rows:
        raise BatchError(
            f"cannot split {num_rows} rows into {k_partitions} non-empty partitions. Use at least "
            "1 partition, and at most 1 per row."
        )
    if equal_size and num_rows % k_partitions:
        raise BatchError(
            f"cannot split {num_rows} rows into {k_partitions} partitions of equal size. Pass "
            f"equal_size=False, or {num_rows - num_rows % k_partitions} rows."
        )

    by_length = sorted(range(num_rows), key=lambda row: (-seqlen_list[row], row))
    rows_at_once = k_partitions if equal_size else 1
    # (minus the spread, lowest row, parts): lowest rows are unique, so parts are never compared
    heap: list[tuple[int, int, _Parts]] = []
    for start in range(0, num_rows, rows_at_once):
        rows = by_length[start : start + rows_at_once]
        parts = [(int(seqlen_list[row]), [row]) for row in rows]
        heapq.heappush(heap, (-_spread(parts, k_partitions), min(rows), parts))

    while len(heap) > 1:
        _, low, first = heapq.heappop(heap)
        _, other_low, other = heapq.heappop(heap)
        parts = _merge_opposed(first, other, k_partitions)
        heapq.heappush(heap, (-_spread(parts, k_partitions), min(low, other_low), parts))
    _, _, parts = heap[0]
    return sorted(sorted(rows) for _, rows in parts)


def _spread(parts: _Parts, k: int) -> int:
    """Return the largest total length of the k partitions minus the smallest."""
    return parts[0][0] - (parts[-1][0] if len(parts) == k else 0)


def _merge_opposed(first: _Parts, other: _Parts, k: int) -> _Parts:
    """Join the heaviest part of one side with the lightest part of the other, and so on.

    Missing parts count as empty.
    """
    padded_first = first + [(0, [])] * (k - len(first))
    padded_other = other + [(0, [])] * (k - len(other))
    joined = [
        (a + b, left + right)
        for (a, left), (b, right) in zip(padded_first, reversed(padded_other), strict=True)
    ]
    return sorted((part for part in joined if part[1]), key=lambda part: (-part[0], part[1]))


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Return the inverse permutation, which undoes a reordering by `idx_map`."""
    inverse = [0] * len(idx_map)
    for position, row in enumerate(idx_map):
        inverse[row] = position
    return inverse


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Hashable], k_partitions: int
) -> list[list[int]]:
    """Divide rows into sets of nearly equal total length that do not split a group.

    Args:
        seqlen_list: length of each row.
        uid_list: uid of each row; rows with the same uid stay together.
        k_partitions: number of sets; each has the same number of uids.
    """
    if len(seqlen_list) != len(uid_list):
        raise BatchError(
            f"{len(seqlen_list)} lengths and {len(uid_list)} uids do not match. Pass one of each "
            "per row."
        )
    rows_of_uid: dict[Hashable, list[int]] = {}
    for row, uid in enumerate(uid_list):
        rows_of_uid.setdefault(uid, []).append(row)
    groups = list(rows_of_uid.values())
    if not 1 <= k_partitions <= len(groups) or len(groups) % k_partitions:
        raise BatchError(
            f"cannot split {len(groups)} uids into {k_partitions} partitions with the same number "
            f"of uids. Use a divisor of {len(groups)}."
        )
    lengths = [sum(int(seqlen_list[row]) for row in rows) for rows in groups]
    partitions = get_seqlen_balanced_partitions(lengths, k_partitions, equal_size=True)
    return [sorted(row for group in part for row in groups[group]) for part in partitions]
