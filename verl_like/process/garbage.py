"""The garbage collector in a process that works for long; `trainer.loop` enters it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

OF_PYTHON = 10_000
"""More objects than Python itself keeps from its start (375 in 3.12)."""


@contextmanager
def old_objects_kept() -> Iterator[None]:
    """Within, the collector does not look at what exists already.

    Modules and configuration live until the end: some 400 000 objects after torch and
    transformers, which every full collection would walk. Where whoever started the process keeps
    objects already, all stays as it is: to let go of some is to let go of all.
    """
    if somebody_keeps_objects():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@cache
def somebody_keeps_objects() -> bool:
    """Whether they did when this was first asked: Python counts them one by one, 40 ms of many."""
    return gc.get_freeze_count() > OF_PYTHON
