"""Several threads of the driver call groups at the same time, as asynchronous training does."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.verl_like.groups import start
from tests.verl_like.sample_workers import Adder, Faulty
from verl_like import DataProto
from verl_like.calls.transport import take_all

ROLES = {"add": (Adder, (1,)), "more": (Adder, (10,)), "faulty": (Faulty, ())}
BACKENDS = ["inline", "child", pytest.param("ray", marks=pytest.mark.ray)]
NUM_CALLS = 25


@pytest.fixture(autouse=True)
def threads_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module", params=BACKENDS)
def pools(request: pytest.FixtureRequest):
    """Two pools of one process with the same roles."""
    options = {"own_processes": True} if request.param == "child" else {}
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    with contextlib.ExitStack() as stack:
        groups = [
            stack.enter_context(start(request.param, ROLES, [1], seed=seed, **options))
            for seed in (1, 2)
        ]
        yield [fused.spawn(ROLES) for fused in groups]


def in_threads(jobs: list[Callable[[], object]]) -> None:
    """Run each function in a separate thread; raise the first error."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def add_rows(group, amount: int, first: int) -> None:
    """Add to batches of several sizes, whose rows name their call."""
    for call in range(NUM_CALLS):
        x = torch.arange(1 + call % 4) + first + 100 * call
        letters = np.array([f"{call}"] * len(x), dtype=object)
        added = group.add.remote(DataProto.from_dict({"x": x}, {"o": letters})).get()
        assert torch.equal(added.batch["x"], x + amount)
        assert list(added.non_tensor_batch["o"]) == list(letters)


def test_every_thread_gets_the_results_of_its_own_calls(pools) -> None:
    for groups in pools:
        groups["add"].transport.take_finished()
    jobs: list[Callable[[], object]] = []
    for number, groups in enumerate(pools):
        jobs.append(lambda g=groups, n=number: add_rows(g["add"], 1, 10_000 * n))
        jobs.append(lambda g=groups, n=number: add_rows(g["more"], 10, 10_000 * n + 5_000))
    taken: list[str] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            for groups in pools:
                headers = groups["add"].transport.take_finished()
                taken.extend(header.role for header in headers)
            time.sleep(0.001)

    watching = threading.Thread(target=watch)
    watching.start()
    in_threads(jobs)
    is_over.set()
    watching.join()
    taken += [header.role for g in pools for header in g["add"].transport.take_finished()]
    assert taken.count("add") == taken.count("more") == 2 * NUM_CALLS


def test_concurrent_calls_return_to_their_threads_while_a_call_runs(pools) -> None:
    if pools[0]["add"].transport.place(0) == "in the caller's thread":
        busy = None
    else:
        busy = pools[0]["faulty"].sleeps(1.0)

    def ask(first: int) -> None:
        for value in range(first, first + NUM_CALLS):
            assert pools[0]["faulty"].stop(value) == [value]

    in_threads([lambda first=first: ask(first) for first in (0, 1000, 2000)])
    assert busy is None or busy.get() == [0]


def test_inline_pools_draw_the_same_numbers_in_one_or_more_threads() -> None:
    drawn = []
    for together in (False, True):
        with start("inline", ROLES, [1], seed=5) as one, start("inline", ROLES, [1], seed=6) as two:
            groups = [one.spawn(ROLES)["add"], one.spawn(ROLES)["more"], two.spawn(ROLES)["add"]]
            values: list[list[float]] = [[] for _ in groups]

            def draw(number: int, groups=groups, values=values) -> None:
                for _ in range(40):
                    values[number] += groups[number].draw()

            torch.manual_seed(3)
            if together:
                in_threads([lambda number=number: draw(number) for number in range(3)])
            else:
                for number in range(3):
                    draw(number)
            drawn.append((values, torch.rand(1)))
    assert drawn[0] == drawn[1]


def test_take_all_survives_a_thread_that_takes_the_last_entry() -> None:
    class Emptied(deque[int]):
        """Loses its last entry once its length has been read."""

        def __len__(self) -> int:
            return super().__len__() + 1

    assert list(take_all(Emptied([1, 2]))) == [1, 2]


def test_unread_failures_are_reported_once_across_threads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with start("inline", ROLES, [1]) as fused:
        groups = fused.spawn(ROLES)
        row = DataProto.from_dict({"x": torch.zeros(1)})
        for _ in range(40):
            groups["faulty"].raises.remote(row)
        in_threads([lambda: [groups["add"].pid() for _ in range(10)] for _ in range(4)])
    unread = [r for r in caplog.records if "its result was never read" in r.getMessage()]
    assert len(unread) == 40
