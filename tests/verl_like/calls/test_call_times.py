"""A call is late at ten times its own median."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from tests.verl_like.fake_transport import fake_group
from verl_like import DataProto
from verl_like.calls.deadlines import CallTimes, Deadlines
from verl_like.errors import WaitTimeoutError

LIMITS = Deadlines(call_s=7200.0, min_call_s=60.0)


def times_of(*seconds: float, rows: int = 0) -> CallTimes:
    times = CallTimes()
    for call_s in seconds:
        times.add("actor.update_actor", call_s, rows)
    return times


def test_the_first_call_has_the_whole_deadline() -> None:
    assert CallTimes().limit_s("actor.update_actor", 0, LIMITS) == 7200.0
    assert times_of(20.0, 20.0, 20.0).limit_s("actor.update_critic", 0, LIMITS) == 7200.0


def test_the_first_calls_are_late_at_ten_times_the_slowest() -> None:
    assert times_of(20.0).limit_s("actor.update_actor", 0, LIMITS) == 200.0
    assert times_of(20.0, 30.0).limit_s("actor.update_actor", 0, LIMITS) == 300.0
    assert times_of(0.1).limit_s("actor.update_actor", 0, LIMITS) == 60.0


def test_a_small_first_call_does_not_make_the_second_late() -> None:
    assert times_of(20.0, rows=2).limit_s("actor.update_actor", 16, LIMITS) == 1600.0
    assert times_of(0.1, rows=1).limit_s("actor.update_actor", 400, LIMITS) == 400.0
    assert times_of(0.1, rows=0).limit_s("actor.update_actor", 16, LIMITS) == 7200.0


def test_a_call_is_late_at_ten_times_its_median_within_bounds() -> None:
    assert times_of(20.0, 900.0, 21.0).limit_s("actor.update_actor", 0, LIMITS) == 210.0
    assert times_of(0.1, 0.1, 0.1).limit_s("actor.update_actor", 0, LIMITS) == 60.0
    assert times_of(2e3, 2e3, 2e3).limit_s("actor.update_actor", 0, LIMITS) == 7200.0
    short = Deadlines(call_s=30.0)
    assert times_of(1.0, 1.0, 1.0).limit_s("actor.update_actor", 0, short) == 30.0


def test_the_median_covers_only_recent_calls() -> None:
    assert times_of(*[7.0] * 30, *[50.0] * 25).limit_s("actor.update_actor", 0, LIMITS) == 500.0


def test_more_rows_get_more_time_and_fewer_rows_no_less() -> None:
    times = times_of(20.0, 20.0, 20.0, rows=8)
    assert times.limit_s("actor.update_actor", 80, LIMITS) == 2000.0
    assert times.limit_s("actor.update_actor", 4, LIMITS) == 200.0
    assert times.limit_s("actor.update_actor", 0, LIMITS) == 200.0


@pytest.mark.parametrize("slowest", [5.9, 6.0, 6.1, 30.0])
@pytest.mark.parametrize("rows", [0, 3, 4, 5, 12])
def test_the_limit_matches_the_medians(slowest: float, rows: int) -> None:
    times, seconds = CallTimes(), [0.5, slowest, slowest]
    for call_s, num_rows in zip(seconds, (8, 4, 4), strict=True):
        times.add("a", call_s, num_rows)
    ratio = max(1.0, rows / statistics.median((8, 4, 4)))
    limit = max(60.0, 10.0 * statistics.median(seconds) * ratio)
    assert times.limit_s("a", rows, LIMITS) == limit


def test_a_hanging_call_is_late_by_the_times_of_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = fake_group(1)
    group.transport.deadlines = Deadlines(call_s=7200.0, min_call_s=0.05)
    batch = DataProto.from_dict({"x": torch.zeros(4)})
    for _ in range(3):
        group.echo(batch)

    monkeypatch.setattr(group.transport, "wait", lambda references, seconds: time.sleep(0.01) or [])
    with pytest.raises(WaitTimeoutError, match=r"(?s)modes.echo: .*raise timeouts.min_call_s"):
        group.echo(batch)


def test_the_warning_says_when_a_call_is_the_first_of_its_method(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = fake_group(1)
    group.transport.deadlines = Deadlines(call_s=0.2, warn_s=0.01)
    batch = DataProto.from_dict({"x": torch.zeros(4)})
    waits = group.transport.wait
    for _ in range(2):
        monkeypatch.setattr(group.transport, "wait", lambda *_: time.sleep(0.01) or [])
        with caplog.at_level("WARNING"), pytest.raises(WaitTimeoutError):
            group.echo(batch)
        monkeypatch.setattr(group.transport, "wait", waits)
        group.echo(batch)

    first, *_, later = [record.getMessage() for record in caplog.records]
    assert first.startswith(
        "modes.echo, the first of its calls, which may load or compile: waiting"
    )
    assert later.startswith("modes.echo: waiting for modes rank 0")
