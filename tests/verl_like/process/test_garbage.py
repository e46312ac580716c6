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
def test_within_the_collector_leaves_alone_what_exists_already() -> None:
    before = [{} for _ in range(1000)]

    with ignore_old_objects():
        new: list[int] = []
        within = looked_at()

    assert id(before) not in within
    assert id(new) in within


@pytest.mark.usefixtures("nothing_is_kept")
def test_afterwards_it_looks_at_all_again_however_the_run_ended() -> None:
    before: list[int] = []

    with pytest.raises(KeyError), ignore_old_objects():
        raise KeyError("a step failed")

    assert id(before) in looked_at()


@pytest.mark.usefixtures("nothing_is_kept")
def test_what_somebody_keeps_for_longer_stays_kept() -> None:
    before: list[int] = []
    with ignore_old_objects():
        pass  # when nobody did yet
    gc.freeze()
    new: list[int] = []

    with ignore_old_objects():
        assert id(new) in looked_at()

    assert id(before) not in looked_at()


def test_the_collector_rests_within_and_works_again_if_it_did_before() -> None:
    with pause_collection():
        with pause_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
