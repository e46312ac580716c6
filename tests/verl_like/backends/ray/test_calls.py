"""Calls on Ray, small and large, queued and concurrent: order, errors, deaths."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch

from tests.verl_like.groups import start
from verl_like import DataProto, Dispatch, Worker, gather, register
from verl_like.calls import future
from verl_like.calls.deadlines import Deadlines
from verl_like.errors import WaitTimeoutError, WorkerDiedError, WorkerError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]
LARGE = 300_000


class UnreadableThere:
    """Can be pickled, but not unpickled."""

    def __reduce__(self):
        return int, ("no number",)


class Witness(Worker):
    """Records its calls in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_in_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def see(self, value: object) -> None:
        self.seen.append(value)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def see_later(self, value: object, seconds: float) -> None:
        time.sleep(seconds)
        self.seen.append(value)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def all_seen(self) -> list[object]:
        return self.seen

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generator(self):
        return (number for number in range(3))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def give(self, value: object) -> object:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def give_concurrently(self, value: object) -> object:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def generator_concurrently(self):
        return self.generator()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def unreadable_concurrently(self) -> object:
        return UnreadableThere()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def die_concurrently(self) -> None:
        self.die()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def unreadable(self) -> object:
        return UnreadableThere()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_s(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        data.batch["x"] += 1
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def group():
    deadlines = Deadlines(start_s=180, call_s=2, grace_s=2)
    with start("ray", {"witness": (Witness, ())}, [2], deadlines=deadlines) as group:
        yield group


def test_calls_run_in_the_order_of_submission(group) -> None:
    before = len(group.all_seen()[0])
    for number in range(30):
        if number % 7 < 3:
            group.see_later(number, 0.02)
        else:
            group.see(number)
    assert [seen[before:] for seen in group.all_seen()] == [list(range(30))] * 2
    assert group.is_in_main_thread() == [True, True]


def test_several_threads_can_call_one_group(group) -> None:
    def both(number: int) -> list[object]:
        group.see_later(number, 0.001)
        return group.give(number)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(both, range(40))) == [[n, n] for n in range(40)]
    assert sorted(group.all_seen()[1][-40:]) == list(range(40))


def test_large_results_and_arguments_arrive_whole(group) -> None:
    assert [len(rank) for rank in group.zeros(LARGE)] == [LARGE] * 2
    assert group.give("x" * LARGE) == ["x" * LARGE] * 2
    assert group.give(torch.ones(LARGE))[1].sum() == LARGE


def test_unpicklable_values_raise_the_errors_of_a_ray_task(group) -> None:
    for _ in range(2):
        with pytest.raises(
            WorkerError, match="witness.generator.*cannot be pickled for another process.*generator"
        ):
            group.generator()
        with pytest.raises(
            WorkerError, match="witness.unreadable.*cannot be pickled for another process"
        ):
            group.unreadable()
        with pytest.raises(
            WorkerError, match="witness.give.*cannot be pickled for another process"
        ):
            group.give(UnreadableThere())
        with pytest.raises(TypeError, match="cannot pickle"):
            group.give(threading.Lock())
        with pytest.raises(
            WorkerError,
            match="witness.generator_concurrently.*cannot be pickled for another process",
        ):
            group.generator_concurrently()
        with pytest.raises(WorkerError, match="unreadable_concurrently.*cannot read the answer"):
            group.unreadable_concurrently()
        with pytest.raises(
            WorkerError, match="witness.give_concurrently.*cannot be pickled for another process"
        ):
            group.give_concurrently(UnreadableThere())
        with pytest.raises(WorkerError, match="arguments cannot be sent.*cannot pickle"):
            group.give_concurrently(threading.Lock())
    assert group.give_concurrently("x" * LARGE) == ["x" * LARGE] * 2
    assert group.give(1) == [1, 1]


def test_a_late_call_shows_its_stack_and_later_calls_run(group) -> None:
    with pytest.raises(
        WaitTimeoutError, match=r"(?s)witness.sleep_s: .* within 2.0 s.*in sleep_s"
    ) as caught:
        group.sleep_s(3.0)
    assert "rank 0 of 2" in str(caught.value)
    assert ", and of rank 1 the same" in str(caught.value)
    assert group.give("after") == ["after", "after"]
    assert group.give_concurrently("after") == ["after", "after"]


def test_stacks_show_the_running_call(group) -> None:
    assert group.transport.stacks(5.0) == dict.fromkeys([0, 1], "idle: no call is running")
    running = group.see_later("shown", 1.0)
    until = time.monotonic() + 10
    while "in see_later" not in (text := group.transport.stacks(5.0)[1]):
        assert time.monotonic() < until, text
    running.get()


def test_results_of_late_calls_of_a_pool_come_in_one_request(
    group, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, get = [], ray.get
    monkeypatch.setattr(future, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(ray, "get", lambda what, **more: asked.append(what) or get(what, **more))
    rows = DataProto.from_dict({"x": torch.zeros(1)})
    waiting = group.sleep_s.remote(0.3)
    calls = [group.echo.remote_on(rank, rows) for rank in range(2)]
    assert [batch.batch["x"].tolist() for batch in gather(*calls)] == [[1.0], [1.0]]
    assert [call.pending[0].payload for call in calls] in asked
    assert waiting.get() == ["slept", "slept"]


@pytest.mark.parametrize("method", ["die", "die_concurrently"])
def test_a_death_in_a_call_is_reported_with_its_cause(method: str) -> None:
    deadlines = Deadlines(start_s=180, call_s=60, grace_s=2)
    with start("ray", {"witness": (Witness, ())}, [2], deadlines=deadlines) as group:
        cause = "killed by SIGKILL" if method == "die" else "it ended without"
        began = time.monotonic()
        with pytest.raises(
            WorkerDiedError, match=rf"witness.{method}, witness rank 1 of 2 \(pid .*{cause}"
        ):
            getattr(group, method)()
        assert time.monotonic() - began < 15
        with pytest.raises(WorkerDiedError, match="witness.give, witness rank 1 of 2"):
            group.give(0)
        with pytest.raises(
            WorkerDiedError, match="witness.give_concurrently, witness rank 1 of 2 .* is gone"
        ):
            group.give_concurrently(0)
        assert group.transport.fetch(group.give.remote(0).pending[0].header)
