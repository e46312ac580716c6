"""`verl_like.process.garbage`."""

from __future__ import annotations

import gc

import pytest

from verl_like.process.garbage import old_objects_kept


def test_within_the_collector_leaves_alone_what_exists_already() -> None:
    before = [{} for _ in range(1000)]

    with old_objects_kept():
        new: list[int] = []
        looked_at = {id(value) for value in gc.get_objects()}

    assert id(before) not in looked_at
    assert id(new) in looked_at


def test_afterwards_it_looks_at_all_again_however_the_run_ended() -> None:
    before: list[int] = []

    with pytest.raises(KeyError), old_objects_kept():
        raise KeyError("a step failed")

    assert id(before) in {id(value) for value in gc.get_objects()}
