"""Keep the garbage collector away from objects that exist at the start, and from imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FROZEN_BY_PYTHON = 10_000
"""If more objects than this are frozen, other code froze some: Python 3.12 itself freezes 375."""


@contextmanager
def ignore_old_objects() -> Iterator[None]:
    """Inside the block, the garbage collector ignores objects that already exist.

    Modules and configuration live until the end: some 400 000 objects once torch and transformers
    are imported, which every full collection would walk. If the process had frozen objects before,
    nothing changes, because Python can only unfreeze all objects.
    """
    if gc.get_freeze_count() > FROZEN_BY_PYTHON:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pause garbage collection inside the block: imports create many objects and no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
