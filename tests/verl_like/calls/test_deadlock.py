"""Ranks that wait for each other are named; whoever works, or waits for one that does, is not."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.verl_like.groups import start
from tests.verl_like.sample_workers import Adder, Faulty
from tests.waiting import wait_until
from verl_like.calls import deadlock
from verl_like.calls.deadlock import DeadlockWatch
from verl_like.calls.progress import AT_LOCK, ELSEWHERE, IDLE, IN_COLLECTIVE, Progress
from verl_like.calls.waiting import Deadlines
from verl_like.errors import ConfigError, WaitTimeoutError
from verl_like.process.facts import ProcessFacts

QUICK = Deadlines(deadlock_s=0.6, grace_s=2)
BARRIER = Progress(1, IN_COLLECTIVE, "a.py:1", "0x1:7")
REDUCE = Progress(1, IN_COLLECTIVE, "a.py:2", "0x2:9")
LOCK = Progress(1, AT_LOCK, "b.py:1", "0x3:4")
WORKS = Progress(1, ELSEWHERE, "c.py:1")
NONE = Progress(1, IDLE)


def pool(*says: Progress) -> Any:
    """A pool whose ranks say this whenever they are asked."""
    found = dict(enumerate(says))
    facts, deadlines = [ProcessFacts()] * len(says), Deadlines()
    return SimpleNamespace(
        world_size=len(says),
        progress=lambda seconds: dict(found),
        other_pools=[],
        found=found,
        facts=facts,
        deadlines=deadlines,
    )


def judged(
    own: Any, *others: Any, unanswered: Any = (0,), meanwhile: Any = lambda: None
) -> list[int]:
    """What is said after looks at 0 and 20 s, for a limit of 15 s."""
    now = [0.0]
    own.other_pools = others
    watch = DeadlockWatch(own, clock=lambda: now[0])
    watch.look()
    assert watch.judge(unanswered, 15.0) == [], "one look says nothing"
    meanwhile()
    now[0] = 20.0
    watch.look()
    return watch.judge(unanswered, 15.0)


@pytest.mark.parametrize(
    ("says", "unanswered", "stuck"),
    [
        ((BARRIER, NONE), [0], [0]),
        ((BARRIER, REDUCE), [0, 1], [0, 1]),
        ((BARRIER, BARRIER, NONE), [0, 1], [0, 1]),
        ((BARRIER, WORKS), [0, 1], []),
        ((BARRIER, BARRIER), [0, 1], []),
    ],
    ids=["left by one", "in two collectives", "left by the last", "one works", "slow network"],
)
def test_ranks_of_one_pool_in_collectives_that_nobody_ends_are_named_whatever_others_do(
    says: Any, unanswered: list[int], stuck: list[int]
) -> None:
    assert judged(pool(*says), pool(WORKS), unanswered=unanswered) == stuck


@pytest.mark.parametrize(
    ("own", "other", "stuck"),
    [
        ((LOCK,), (NONE,), [0]),
        ((LOCK,), (LOCK,), [0]),
        ((LOCK,), (WORKS,), []),
        ((BARRIER, LOCK), (WORKS,), []),
        ((BARRIER, LOCK), (NONE,), [0]),
        ((WORKS,), (NONE,), []),
    ],
)
def test_what_may_be_a_wait_for_another_pool_is_a_deadlock_only_where_nobody_moves(
    own: Any, other: Any, stuck: list[int]
) -> None:
    assert judged(pool(*own), pool(*other)) == stuck


@pytest.mark.parametrize(("num_ranks", "first_look"), [(2, 5.0), (512, 20.48)])
def test_the_more_ranks_a_run_has_the_rarer_are_looks(num_ranks: int, first_look: float) -> None:
    own, now, looks = pool(*[WORKS] * num_ranks), [0.0], []
    own.other_pools = [pool(*[WORKS] * num_ranks)]
    watch = DeadlockWatch(own, clock=lambda: now[0])
    own.progress = lambda seconds: looks.append(now[0]) or {}
    for now[0] in (4.9, first_look - 0.1, first_look):
        watch.stuck([0])
    wait_until(lambda: looks)
    assert looks == [first_look]


def test_a_rank_whose_call_has_yet_to_begin_may_still_come() -> None:
    assert judged(pool(BARRIER, NONE), pool(WORKS), unanswered=[0, 1]) == []
    assert judged(pool(BARRIER, NONE), pool(NONE), unanswered=[0, 1]) == [0]


@pytest.mark.parametrize(
    "moved",
    [
        {"wakeups": "0x3:5"},
        {"cpu_s": 1.0},
        {"stack": "b.py:2"},
        {"num_calls": 2},
    ],
)
def test_a_rank_that_has_moved_between_two_looks_is_left_alone(moved: dict[str, Any]) -> None:
    own = pool(LOCK)
    assert judged(own, meanwhile=lambda: own.found.update({0: replace(LOCK, **moved)})) == []


def found_after(own: Any, gives_up_soon: bool, cpu_share: float = 0.0) -> float | None:
    """The age at which a wait is given up that is asked every half second, for a minute."""
    now = [0.0]
    watch = DeadlockWatch(own, lambda: now[0], gives_up_soon)
    while now[0] < 60:
        own.found[0] = replace(own.found[0], cpu_s=cpu_share * now[0])
        if watch.stuck([0]):
            return now[0]
        if watch._looking is not None:
            watch._looking.join()
        now[0] += 0.5
    return None


def test_a_call_whose_ranks_wait_for_nobody_for_long_is_given_up_sooner_on_one_node() -> None:
    assert found_after(pool(LOCK, NONE), gives_up_soon=True) == 5.5
    assert found_after(pool(LOCK, NONE), gives_up_soon=False) == 20.5
    several = pool(LOCK, NONE)
    several.facts = [ProcessFacts(one_node=False)] * 2
    assert found_after(several, gives_up_soon=True) == 20.5
    several.facts, several.deadlines = [ProcessFacts()] * 2, Deadlines(deadlock_s=40.0)
    assert found_after(several, gives_up_soon=True) == 11.5


def test_a_slow_transfer_is_not_given_up() -> None:
    assert found_after(pool(LOCK, NONE), gives_up_soon=True, cpu_share=0.03) is None


def test_a_rank_that_does_not_answer_counts_as_moving() -> None:
    own = pool(LOCK, NONE)
    assert judged(own, meanwhile=lambda: own.found.pop(1)) == []


def test_sleep_is_no_deadlock_and_a_collective_that_a_rank_has_left_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlock, "LOOK_EVERY_S", 0.3)
    roles = {"faulty": (Faulty, ()), "adder": (Adder, ())}
    with start("child", roles, [2], deadlines=QUICK) as fused:
        groups = fused.spawn(roles)
        groups["adder"].allreduce()
        assert groups["faulty"].sleeps(1.5).get() == [0, 1]
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError, match="rank 0 in barrier .* rank 1 never entered"):
            groups["faulty"].leaves_the_others().get()
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("backend", ["child", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_worker_at_a_lock_that_nobody_gives_is_named_with_its_stack(
    backend: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    alone: dict[str, Any] = {"own_processes": True}
    if backend == "ray":
        request.getfixturevalue("ray_session")
        alone = {}
    monkeypatch.setattr(deadlock, "LOOK_EVERY_S", 0.3)
    with start(backend, {"faulty": (Faulty, ())}, [1], deadlines=QUICK, **alone) as group:
        began = time.monotonic()
        with pytest.raises(
            WaitTimeoutError, match=r"(?s)stood still for 0.6 s.*lock.acquire.*watch.deadlock_s"
        ):
            group.waits_for_itself().get()
        assert time.monotonic() - began < 20


def test_the_deadline_is_a_setting() -> None:
    assert Deadlines.of({"deadlock_s": 40.0}).deadlock_s == 40.0
    with pytest.raises(ConfigError, match="above 0"):
        Deadlines.of({"deadlock_s": 0.0})
