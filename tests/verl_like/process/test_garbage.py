"""Old objects are hidden from the garbage collector, which can also be paused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from verl_like.process.garbage import ignore_old_objects, pause_collection


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """Start as in an unprepared process; the test process has frozen its modules."""
    gc.unfreeze()
    yield
    gc.freeze()


def collected() -> set[int]:
    """Return the ids of the objects that the collector walks."""
    return {id(value) for value in gc.get_objects()}


def test_old_objects_are_ignored_only_within_the_block() -> None:
    before, new, within = [1], [2], set[int]()

    with suppress(KeyError), ignore_old_objects():
        new = [3]
        within = collected()
        raise KeyError("a step failed")

    assert id(before) not in within
    assert id(new) in within
    assert id(before) in collected()


def test_objects_frozen_by_others_stay_frozen() -> None:
    before: list[int] = []
    with ignore_old_objects():
        pass  # while nothing is frozen
    gc.freeze()
    new: list[int] = []

    with ignore_old_objects():
        assert id(new) in collected()

    assert id(before) not in collected()


def test_pause_collection_can_be_nested() -> None:
    with pause_collection():
        with pause_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
