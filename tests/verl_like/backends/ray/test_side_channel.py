"""Small awaited calls on Ray go over a line of their own, and nobody can tell but by the time they
take.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.verl_like.groups import start
from verl_like import DataProto, Dispatch, Worker, register
from verl_like.backends.ray import side_channel as door
from verl_like.calls.waiting import Deadlines
from verl_like.errors import WaitTimeoutError, WorkerDiedError, WorkerError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]
LINE, LARGE = "small calls", 300_000


class UnreadableThere:
    """Can be pickled, and not be read again."""

    def __reduce__(self):
        return int, ("no number",)


class Witness(Worker):
    """Tells how its calls came."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def way(self) -> tuple[str | None, bool]:
        import ray

        in_main = threading.current_thread() is threading.main_thread()
        return ray.get_runtime_context().get_task_name(), in_main

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
def shared():
    with start(
        "ray", {"witness": (Witness, ())}, [2], deadlines=Deadlines(start_s=60, call_s=2, grace_s=2)
    ) as group:
        yield group


@pytest.fixture
def group(shared):
    """At the line: two small calls in a row."""
    shared.see_later("task", 0.0).get()
    shared.way()
    shared.way()
    return shared


def test_from_the_second_in_a_row_small_calls_come_over_the_line_in_the_main_thread(group) -> None:
    assert group.way() == [(LINE, True)] * 2
    group.see_later("task", 0.0).get()
    assert group.way() == [("witness.way", True)] * 2
    assert group.way() == [(LINE, True)] * 2


def test_calls_run_in_the_order_in_which_they_were_made(group) -> None:
    group.zeros(0)
    before = len(group.all_seen()[0])
    for number in range(30):
        if number % 7 < 3:
            group.see_later(number, 0.02)
        else:
            group.see(number)
    assert [seen[before:] for seen in group.all_seen()] == [list(range(30))] * 2


def test_several_threads_may_call(group) -> None:
    def both(number: int) -> list[object]:
        group.see_later(number, 0.001)
        return group.give(number)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(both, range(40))) == [[n, n] for n in range(40)]
    assert sorted(group.all_seen()[1][-40:]) == list(range(40))


def test_large_results_and_arguments_come_whole_and_small_calls_go_on(group) -> None:
    assert [len(rank) for rank in group.zeros(LARGE)] == [LARGE] * 2
    assert group.way() == [(LINE, True)] * 2
    assert group.give("x" * LARGE) == ["x" * LARGE] * 2
    assert group.give(torch.ones(LARGE))[1].sum() == LARGE


def test_a_batch_is_a_private_copy(group) -> None:
    data = DataProto.from_dict({"x": torch.arange(3)})
    for _ in range(3):
        assert group.echo(data).batch["x"].tolist() == [1, 2, 3]
    assert data.batch["x"].tolist() == [0, 1, 2]


def test_what_cannot_travel_is_told_as_for_a_task(group) -> None:
    for _ in range(2):
        with pytest.raises(
            WorkerError, match="witness.generator.*cannot travel between processes.*generator"
        ):
            group.generator()
        with pytest.raises(
            WorkerError, match="witness.unreadable.*cannot travel between processes"
        ):
            group.unreadable()
        with pytest.raises(WorkerError, match="witness.give.*cannot travel between processes"):
            group.give(UnreadableThere())
        with pytest.raises(TypeError, match="cannot pickle"):
            group.give(threading.Lock())
    assert group.give(1) == [1, 1]


def test_a_call_past_its_deadline_is_shown_and_the_next_ones_run(group) -> None:
    with pytest.raises(
        WaitTimeoutError, match=r"(?s)witness.sleep_s: .* within 2.0 s.*in sleep_s"
    ) as caught:
        group.sleep_s(3.0)
    assert str(caught.value).count("in sleep_s") == 2
    assert group.give("after") == ["after", "after"]
    assert group.give("after") == ["after", "after"]
    assert group.way() == [(LINE, True)] * 2


def test_only_who_has_the_key_is_let_in(group) -> None:
    import ray

    home = ray.get(group.transport._homes[0])
    wrong = door.Door(home.door.address, home.door.port, b"0" * 16)
    with door.knock(wrong, door.LINE, 5.0) as caller:
        assert caller.recv(1) == b"", "the door is shut"
    with socket.create_connection((home.door.address, home.door.port)) as caller:
        caller.sendall(home.door.key + b"?")
        assert caller.recv(1) == b""
    assert "test_only" not in str(door.ask_stacks(home.door, 5.0))


def test_a_death_in_a_small_call_is_told_with_its_cause() -> None:
    with start(
        "ray",
        {"witness": (Witness, ())},
        [2],
        deadlines=Deadlines(start_s=60, call_s=60, grace_s=2),
    ) as group:
        group.way(), group.way()
        began = time.monotonic()
        with pytest.raises(
            WorkerDiedError, match=r"witness.die, witness rank 1 of 2 \(pid .*killed by SIGKILL"
        ):
            group.die()
        assert time.monotonic() - began < 15
        with pytest.raises(WorkerDiedError, match="witness.way, witness rank 1 of 2"):
            group.way()
        assert group.transport.fetch(group.way.remote().pending[0].header)
