"""Seconds busy, waiting and syncing of every role, and who waits for what."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from trainer.async_training.activity import Activity


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def seen(clock: Clock) -> Activity:
    return Activity(clock)


def test_the_seconds_of_a_role_add_up_to_the_wall_time(seen: Activity, clock: Clock) -> None:
    generator = seen.of("generator 0")
    with generator.busy("generate"):
        clock.now += 4
    clock.now += 1  # outside all blocks
    with generator.waiting("the buffer to have room"):
        clock.now += 2
    with generator.syncing("weights of version 1"):
        clock.now += 0.5
        assert seen.seconds() == {"generator 0": {"busy": 4, "waiting": 3, "syncing": 0.5}}


def test_a_role_without_processes_does_not_wait(seen: Activity, clock: Clock) -> None:
    generator = seen.of("generator 0")
    with generator.busy("generate"):
        clock.now += 2
    with generator.gone("others are to come"):
        clock.now += 5
        assert (
            seen.who_waits()
            == "generator 0 has been without processes for 5.0 s: others are to come"
        )
    clock.now += 1
    assert seen.seconds() == {"generator 0": {"busy": 2, "waiting": 1, "syncing": 0}}
    generator.leave("the other generators have taken over")
    clock.now += 7
    assert seen.seconds() == {"generator 0": {"busy": 2, "waiting": 1, "syncing": 0}}
    with seen.of("trainer").waiting("samples"):
        assert seen.who_waits().startswith("trainer has waited")


def test_a_nested_block_interrupts_the_outer_one(seen: Activity, clock: Clock) -> None:
    generator = seen.of("generator 0")
    with generator.busy("generate"):
        clock.now += 1
        with generator.syncing("weights of version 2"):
            clock.now += 10
        clock.now += 2
    assert seen.seconds()["generator 0"] == {"busy": 3, "waiting": 0, "syncing": 10}


def test_metrics_count_from_the_previous_call(seen: Activity, clock: Clock) -> None:
    with seen.of("generator 0").busy("generate"):
        clock.now += 3
        seen.metrics()
        clock.now += 2
    assert seen.metrics() == {
        "async/generator_0/busy_s": 2,
        "async/generator_0/waiting_s": 0,
        "async/generator_0/syncing_s": 0,
    }


def test_who_waits_names_the_longest_wait_first(seen: Activity, clock: Clock) -> None:
    with ExitStack() as blocks:
        blocks.enter_context(seen.of("generator 1").waiting("weights of version 4 (it holds 3)"))
        clock.now += 2
        blocks.enter_context(seen.of("generator 0").busy("generate"))
        blocks.enter_context(seen.of("generator 2").syncing("weights of version 4"))
        clock.now += 8
        blocks.enter_context(seen.of("trainer").waiting("a batch"))
        clock.now += 2.5
        assert seen.who_waits().split("; ") == [
            "generator 1 has waited 12 s for weights of version 4 (it holds 3)",
            "trainer has waited 2.5 s for a batch",
            "generator 0 has been busy 10 s with generate",
            "generator 2 has spent 10 s syncing weights of version 4",
        ]
    clock.now += 1
    assert "trainer has waited 1.0 s for something to do" in seen.who_waits()
