"""The diagnosis of hanging ranks from their stacks, short even at a thousand ranks."""

from __future__ import annotations

import json
import logging
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.verl_like.groups import start
from tests.verl_like.sample_workers import Adder, Faulty
from verl_like.calls import diagnose
from verl_like.calls.diagnose import (
    HangWatch,
    describe_ranks,
    likely_cause,
    stacks_of_calls,
    who_waits,
)
from verl_like.errors import WaitTimeoutError

FRAME = 'File "a.py", line 1, in {}\n  x\nFile "/torch/distributed_c10d.py", line 2, in {}\n'


def test_likely_cause_reads_stacks() -> None:
    same = dict.fromkeys(range(2), FRAME.format("f", "all_reduce"))
    assert "all ranks are in the same collective" in likely_cause(same, [0, 1])
    assert "rank 1 does not answer" in likely_cause({0: FRAME.format("f", "barrier")}, [0, 1])
    assert "still computing" in likely_cause({0: 'File "a.py", line 1, in f\n'}, [0])
    apart = likely_cause({0: FRAME.format("f", "barrier"), 1: WORK.format(1)}, [0, 1])
    assert "rank 0 in barrier (f, a.py:1) waits in a collective that rank 1 never ent" in apart
    gpu = (
        "thread main:\n"
        + FRAME.format("f", "update")
        + "\nNCCL: all_gather, number {} of group 0 pg"
    )
    cause = likely_cause({0: gpu.format(7), 1: gpu.format(8)}, [0, 1])
    assert "rank 0 in all_gather (number 7 of group 0 pg), rank 1 in all_gather (number 8" in cause


@pytest.mark.parametrize(
    "inner",
    [
        "    lock.acquire()\n",
        '    self.answers.get()\nFile "/lib/queue.py", line 171, in get\n    while not size:\n',
        "    with self._lock:\n",
    ],
)
def test_the_likely_cause_names_ranks_that_wait_for_a_lock(inner: str) -> None:
    stack = f'thread MainThread:\nFile "/code/a.py", line 7, in take\n{inner}'
    cause = likely_cause({0: stack, 1: "idle: no call is running"}, [0])
    assert "rank 0 in take, a.py:7 waits for a lock, an event or a queue" in cause


def test_consecutive_ranks_are_one_span() -> None:
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([2, 1]) == "rank 1, 2"
    assert describe_ranks([*range(512), *range(513, 1024)]) == "rank 0-511, 513-1023"
    assert describe_ranks(range(0, 100, 2)).endswith(", 28, 30 and 34 more")


def test_a_thousand_ranks_in_different_places_are_counted() -> None:
    stacks = {rank: FRAME.format(f"f{rank}", "all_reduce") for rank in range(1024)}
    cause = likely_cause(stacks, range(1024))
    assert cause.endswith("rank 7 in all_reduce (f7, a.py:1) and 1016 more.")
    assert "rank 0-1023 does not answer" in likely_cause({}, range(1024))


def watch_log(*looks: dict[int, str], late: list[int], caplog: Any) -> list[str]:
    """Return the log of a watch that sees these stacks, one after the other."""
    caplog.clear()
    shown = iter(looks)
    pool: Any = SimpleNamespace(
        world_size=2, stacks=lambda seconds: next(shown), describe=lambda rank: f"actor rank {rank}"
    )
    watch = HangWatch(pool, time.monotonic())
    for _ in looks:
        watch._look({"actor.update": late})
    return [record.getMessage() for record in caplog.records]


LOCK = 'File "b.py", line 1, in take\n    lock.acquire()\n'
WORK = 'File "b.py", line {}, in compute\n    x = x @ y\n'


def test_a_hang_is_explained_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits = {0: FRAME.format("f", "barrier"), 1: "idle: no call is running"}
    (message,) = watch_log(waits, waits, waits, late=[0], caplog=caplog)
    assert message.startswith(
        "actor.update: actor rank 0 made no progress for 5 s.\nLikely cause: rank 0"
    )
    assert "waits in a collective that rank 1 never entered" in message
    assert message.count("--- stack of") == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({0: WORK.format(1), 1: LOCK}, {0: WORK.format(2), 1: LOCK}),
        ({0: WORK.format(1), 1: "idle"}, {0: WORK.format(1), 1: "idle"}),
    ],
    ids=["a rank moves", "a rank computes in one place"],
)
def test_no_hang_is_reported_while_a_rank_computes(
    first: dict[int, str], second: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert watch_log(first, second, late=[0, 1], caplog=caplog) == []


def test_stacks_show_the_collective_that_a_gpu_waits_in(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 7, "state": "started"}
    entry["process_group"] = ["0", "default_pg"]
    dump = json.dumps({"entries": [entry | {"is_p2p": True}, entry]})
    monkeypatch.setattr(
        torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda **_: dump, raising=False
    )
    shown = stacks_of_calls(None, test_stacks_show_the_collective_that_a_gpu_waits_in.__code__)
    assert shown == "NCCL: all_reduce, number 7 of group 0 default_pg"
    assert "rank 0 in all_reduce (number 7" in who_waits({0: shown}, [0])


@pytest.mark.long
@pytest.mark.parametrize("backend", ["child", pytest.param("ray", marks=pytest.mark.ray)])
@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("leaves_the_others", "rank 0 in barrier .* waits in a collective that rank 1 never"),
        ("waits_for_itself", "rank 0, 1 in waits_for_itself.* waits for a lock"),
    ],
)
def test_a_hang_is_explained_before_its_deadline(
    backend: str,
    method: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if backend == "ray":
        request.getfixturevalue("ray_session")
    monkeypatch.setattr(diagnose, "LOOK_EVERY_S", 0.3)
    with start(backend, {"faulty": (Faulty, ()), "adder": (Adder, ())}, [2]) as group:
        group.adder_allreduce()
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(WaitTimeoutError, match=f"(?s){words}"),
        ):
            getattr(group, f"faulty_{method}")().get(timeout=8.0)
    (explained,) = [r.getMessage() for r in caplog.records if "made no progress" in r.getMessage()]
    assert re.search(f"(?s){words}", explained)
