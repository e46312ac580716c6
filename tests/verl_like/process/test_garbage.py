"""`verl_like.process.garbage`."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from verl_like.process.garbage import ignore_old_objects, pause_collection


@pytest.fixture
def nothing_is_kept() -> Iterator[None]:
    """Start as in an unprepared process; the test process has frozen its modules."""
    gc.unfreeze()
    yield
    gc.freeze()


def looked_at() -> set[int]:
    return {id(value) for value in gc.get_objects()}


@pytest.mark.usefixtures("nothing_is_kept")
def test_the_collector_ignores_objects_that_existed_before() -> None:
    before = [{} for _ in range(1000)]

    with ignore_old_objects():
        new: list[int] = []
        within = looked_at()

    assert id(before) not in within
    assert id(new) in within


@pytest.mark.usefixtures("nothing_is_kept")
def test_the_collector_sees_old_objects_again_after_an_error() -> None:
    before: list[int] = []

    with pytest.raises(KeyError), ignore_old_objects():
        raise KeyError("a step failed")

    assert id(before) in looked_at()


@pytest.mark.usefixtures("nothing_is_kept")
def test_objects_frozen_by_others_stay_frozen() -> None:
    before: list[int] = []
    with ignore_old_objects():
        pass  # when nobody did yet
    gc.freeze()
    new: list[int] = []

    with ignore_old_objects():
        assert id(new) in looked_at()

    assert id(before) not in looked_at()


def test_pause_collection_can_be_nested() -> None:
    with pause_collection():
        with pause_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
