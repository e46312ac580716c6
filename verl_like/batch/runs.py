"""Columns that repeat themselves, as padded ones do: a bit for each entry, and what the runs hold.

    runs = pack_runs(flat)               # None: it would hardly be smaller
    flat = unpack_runs(runs, num_entries, itemsize)

`verl_like.batch.wire` has columns of batches travel so. Most of a batch is padding where responses
differ in length, so it often fits into a call, which a place in an object store costs more than.
Entries are compared by their bits: NaN and -0.0 come back as they were.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WORTH_IT = 2
"""There are at least so many entries to a run, or the column travels as it is."""
NARROW = (np.dtype(np.int16), np.dtype(np.int32))
"""Types that whole numbers of 8 bytes travel in, where they fit."""

Runs = tuple[bytes, bytes, str]
"""A bit for every entry, whether a run begins there; the value of every run; and their type."""


def pack_runs(flat: NDArray[Any]) -> Runs | None:
    """The runs of a flat array of integers, which stand for entries of any type of that size."""
    begins = np.empty(len(flat), dtype=bool)
    begins[0] = True
    np.not_equal(flat[1:], flat[:-1], out=begins[1:])
    if np.count_nonzero(begins) * WORTH_IT > len(flat):
        return None
    values = flat[begins]
    if values.itemsize > NARROW[-1].itemsize:
        values = values.astype(_narrowest(values), copy=False)
    return np.packbits(begins).tobytes(), values.tobytes(), values.dtype.str


def unpack_runs(runs: Runs, num_entries: int, itemsize: int) -> NDArray[Any]:
    """The flat array again, in memory of its own."""
    bits, content, kind = runs
    begins = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=num_entries)
    run_of_entry = np.cumsum(begins, dtype=np.int32)
    run_of_entry -= 1
    values = np.frombuffer(content, dtype=kind).astype(f"i{itemsize}", copy=False)
    return values.take(run_of_entry)


def _narrowest(values: NDArray[Any]) -> np.dtype[Any]:
    lowest, highest = values.min(), values.max()
    for dtype in NARROW:
        limits = np.iinfo(dtype)
        if limits.min <= lowest and highest <= limits.max:
            return dtype
    return values.dtype
