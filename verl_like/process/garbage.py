"""The garbage collector: it leaves alone what exists from the start, and what is being made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OF_PYTHON = 10_000
"""More objects than Python itself keeps from its start (375 in 3.12)."""


@contextmanager
def old_objects_kept() -> Iterator[None]:
    """Within, the collector does not look at what exists already.

    Modules and configuration live until the end: some 400 000 objects after torch and
    transformers, which every full collection would walk. Where whoever started the process keeps
    objects already, all stays as it is: to let go of some is to let go of all.
    """
    if Others.keep_objects():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def no_collection() -> Iterator[None]:
    """Within, the collector rests: imports make many objects, and no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Others:
    """Whoever keeps objects for longer than a run."""

    are_known = False

    @classmethod
    def keep_objects(cls) -> bool:
        """Whether somebody does; where they do, Python counts them once: 40 ms of so many."""
        cls.are_known = cls.are_known or gc.get_freeze_count() > OF_PYTHON
        return cls.are_known
