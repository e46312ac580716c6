"""A reused rank runs each function as a new one would."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist

from tests.workers.kept_ranks import run_kept
from workers.parallel import sharding


def meet() -> None:
    """Check that the two ranks are in a group."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)


def change_all() -> tuple[int, int, int, float, str | None, int]:
    """Change a setting, a random number, a variable and the groups of the process."""
    found = (
        int(os.environ["RANK"]),
        os.getpid(),
        sharding.SMALL_ELEMENTS,
        float(torch.rand(())),
        os.environ.get("OWN"),
        int(dist.is_initialized()),
    )
    meet()
    dist.all_reduce(torch.ones(1))
    sharding.SMALL_ELEMENTS, os.environ["OWN"] = -1, "set"
    return found


def leave_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        sys.exit("it is no rank any more")
    meet()


def test_the_next_function_finds_the_process_as_the_first_did() -> None:
    first = run_kept(2, change_all)
    assert [rank for rank, *_ in first] == [0, 1]
    assert run_kept(2, change_all) == first
    assert {setting for _, _, setting, *_ in first} == {sharding.SMALL_ELEMENTS}
    assert {(variable, groups) for *_, variable, groups in first} == {(None, 0)}


def test_after_a_failure_the_ranks_are_new_processes() -> None:
    before = {process for _, process, *_ in run_kept(2, change_all)}
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed:\n(?s:.*)it is no rank any more"):
        run_kept(2, leave_on_rank_one)
    assert before.isdisjoint(process for _, process, *_ in run_kept(2, change_all))
