"""Keep the garbage collector away from objects that exist at the start, and from imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OF_PYTHON = 10_000
"""With more frozen objects than this, not only Python froze some: it has 375 (Python 3.12)."""


@contextmanager
def ignore_old_objects() -> Iterator[None]:
    """Inside the block, the garbage collector ignores objects that already exist.

    Modules and configuration live until the end: some 400 000 objects after torch and transformers,
    which every full collection would walk. If the process had frozen objects before, nothing
    changes, because Python can only unfreeze all objects.
    """
    if gc.get_freeze_count() > OF_PYTHON:
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
