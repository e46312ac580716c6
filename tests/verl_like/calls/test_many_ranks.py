"""Errors of a call with failed or missing ranks are short even at a thousand ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from verl_like.calls.deadlines import Deadlines
from verl_like.calls.future import WorkerFuture
from verl_like.calls.messages import Header, Pending, RemoteError
from verl_like.calls.transport import Transport
from verl_like.errors import WaitTimeoutError
from verl_like.process.info import ProcessInfo

NUM_RANKS = 1024
STACK = """thread MainThread:
File "/code/workers/update.py", line 90, in step
  all_reduce(gradients)
File "/torch/distributed/distributed_c10d.py", line 2, in {}
"""


class Ranks(Transport):
    """A thousand ranks, some of which have answered."""

    kind = "ranks"
    submit = shutdown = construct_again = None

    def __init__(self, answers: dict[int, Header]) -> None:
        facts = [ProcessInfo("actor", rank, NUM_RANKS, rank) for rank in range(NUM_RANKS)]
        super().__init__(facts, Deadlines())
        self.answers = answers

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        return [rank for rank in references if rank in self.answers]

    def fetch(self, reference: Any) -> Any:
        return self.answers[reference]

    def stacks(self, seconds: float) -> dict[int, str]:
        return {
            rank: STACK.format("barrier" if rank == 512 else "all_reduce")
            for rank in range(NUM_RANKS)
        }

    def place(self, rank: int) -> str:
        return f"pid {1000 + rank} on node-{rank // 8}"

    def call(self) -> WorkerFuture:
        pending = [Pending(rank, rank, rank, "actor") for rank in range(NUM_RANKS)]
        return WorkerFuture("actor.update", self, pending, lambda *_: None, pending)


def header(rank: int, error: Exception | None = None) -> Header:
    remote = error and RemoteError.of(error)
    return Header("actor", "update", rank, 1000 + rank, 0.0, 1.0, 0.5, error=remote)


def test_a_hang_report_fits_a_screen_and_starts_with_the_odd_rank() -> None:
    with pytest.raises(WaitTimeoutError) as caught:
        Ranks({7: header(7)}).call().get(timeout=0.0)
    lines = str(caught.value).splitlines()
    assert len(lines) < 20
    assert max(map(len, lines)) < 500
    assert lines[0].endswith(
        "actor rank 8 of 1024 (pid 1008 on node-1) and 1015 more did not finish within 0.0 s."
    )
    assert "rank 512 in barrier (step, update.py:90), rank 0-511, 513-1023 in all_" in lines[1]
    assert [line for line in lines if line.startswith("---")] == [
        "--- stack of actor rank 512 of 1024 (pid 1512 on node-64)",
        "--- stack of actor rank 0 of 1024 (pid 1000 on node-0), and of rank 1-511, 513-1023 the "
        "same",
    ]


def test_only_a_few_different_stacks_are_shown() -> None:
    class Apart(Ranks):
        def stacks(self, seconds: float) -> dict[int, str]:
            return {rank: STACK.format(f"all_reduce  # {rank}") for rank in range(NUM_RANKS)}

    with pytest.raises(WaitTimeoutError) as caught:
        Apart({}).call().get(timeout=0.0)
    shown = [line for line in str(caught.value).splitlines() if line.startswith("---")]
    assert len(shown) == 9
    assert shown[-1] == "--- 1016 other stacks, of rank 8-1023"


def test_only_the_first_of_a_thousand_failures_are_shown() -> None:
    failed = {rank: header(rank, ValueError(f"rows of rank {rank}")) for rank in range(NUM_RANKS)}
    with pytest.raises(ValueError, match="rows of rank 0") as caught:
        Ranks(failed).call().get()
    place, *others, count = caught.value.__notes__
    assert "raised in actor.update, actor rank 0 of 1024" in place
    assert len(others) == 8
    assert count == "and 1015 more failures"
