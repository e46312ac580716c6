"""Columns that repeat themselves, as padded ones do: a bit for each entry, and what the runs hold.

    runs = pack_runs(flat)               # None: it would hardly be smaller
    flat = unpack_runs(runs, num_entries, itemsize)

Columns of batches travel so. Most of a batch is padding where responses differ in length, so it
often fits into a call, which a place in an object store costs more than.
Entries are compared by their bits: NaN and -0.0 come back as they were. Several calls of a step
send the same columns, so the runs of the last ones are kept, by a hash of the whole content.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

WORTH_IT = 2
"""There are at least so many entries to a run, or the column travels as it is."""
STEPS_ITEMSIZE = 8
"""Bytes of an entry, of columns that may count up, as `position_ids` do."""
NARROW = (np.dtype(np.int16), np.dtype(np.int32))
"""Types that whole numbers of 8 bytes travel in, where they fit."""

KEPT = 32
"""Columns whose runs are kept: those of two calls or three."""

Runs = tuple[bytes, bytes, str, bool]
"""A bit for every entry, whether a run begins there; the value of every run; their type; and
whether the entries are sums of what the runs hold, as positions are."""


_kept: OrderedDict[tuple[bytes, int], Runs | None] = OrderedDict()
_keeping = threading.Lock()


def pack_runs(flat: NDArray[Any]) -> Runs | None:
    """The runs of a flat array of integers, which stand for entries of any type of that size."""
    key = xxhash.xxh3_128_digest(flat.data), flat.itemsize
    with _keeping:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]

    runs = _find_runs(flat)
    with _keeping:
        _kept[key] = runs
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    return runs


def _find_runs(flat: NDArray[Any]) -> Runs | None:
    runs = _runs_of(flat, are_steps=False)
    if runs is None and flat.itemsize == STEPS_ITEMSIZE:
        runs = _runs_of(np.diff(flat, prepend=flat.dtype.type(0)), are_steps=True)
    return runs


def _runs_of(flat: NDArray[Any], are_steps: bool) -> Runs | None:
    begins = np.empty(len(flat), dtype=bool)
    begins[0] = True
    np.not_equal(flat[1:], flat[:-1], out=begins[1:])
    if np.count_nonzero(begins) * WORTH_IT > len(flat):
        return None
    values = flat[begins]
    if values.itemsize > NARROW[-1].itemsize:
        values = values.astype(_narrowest(values), copy=False)
    return np.packbits(begins).tobytes(), values.tobytes(), values.dtype.str, are_steps


def unpack_runs(runs: Runs, num_entries: int, itemsize: int) -> NDArray[Any]:
    """The flat array again, in memory of its own."""
    bits, content, kind, are_steps = runs
    begins = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=num_entries)
    lengths = np.diff(np.flatnonzero(begins.view(bool)), append=num_entries)
    values = np.frombuffer(content, dtype=kind).astype(f"i{itemsize}", copy=False)
    flat = values.repeat(lengths)
    # a running sum by numpy takes four times as long
    return torch.from_numpy(flat).cumsum(0).numpy() if are_steps else flat


def _narrowest(values: NDArray[Any]) -> np.dtype[Any]:
    lowest, highest = values.min(), values.max()
    for dtype in NARROW:
        limits = np.iinfo(dtype)
        if limits.min <= lowest and highest <= limits.max:
            return dtype
    return values.dtype
