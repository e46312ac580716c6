"""Why ranks do not come back, read off their stacks, in words that a thousand ranks leave short."""

from __future__ import annotations

import pytest

from verl_like.calls.stacks import likely_cause, ranks_alike, ranks_in_words

FRAME = 'File "a.py", line 1, in {}\n  x\nFile "/torch/distributed_c10d.py", line 2, in {}\n'


def test_likely_cause_reads_stacks() -> None:
    same = dict.fromkeys(range(2), FRAME.format("f", "all_reduce"))
    assert "all ranks are in the same collective" in likely_cause(same, [0, 1])
    assert "rank 1 does not answer" in likely_cause({0: FRAME.format("f", "barrier")}, [0, 1])
    assert "still computing" in likely_cause({0: 'File "a.py", line 1, in f\n'}, [0])
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
def test_a_rank_at_a_lock_is_said_to_wait_for_one(inner: str) -> None:
    stack = f'thread MainThread:\nFile "/code/a.py", line 7, in take\n{inner}'
    cause = likely_cause({0: stack, 1: "idle: no call is running"}, [0])
    assert "rank 0 in take, a.py:7 waits for a lock, an event or a queue" in cause


def test_ranks_that_follow_each_other_are_one_span() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([2, 1]) == "rank 1, 2"
    assert ranks_in_words([*range(512), *range(513, 1024)]) == "rank 0-511, 513-1023"
    assert ranks_in_words(range(0, 100, 2)).endswith(", 28, 30 and 34 more")


def test_the_value_of_the_fewest_ranks_comes_first() -> None:
    assert ranks_alike({0: "a", 1: "b", 2: "a", 3: "c", 4: "a"}) == [[1], [3], [0, 2, 4]]


def test_of_a_thousand_ranks_in_a_collective_the_one_that_is_elsewhere_comes_first() -> None:
    stacks = dict.fromkeys(range(1024), FRAME.format("step", "all_reduce"))
    stacks[512] = FRAME.format("save", "barrier")
    assert likely_cause(stacks, range(1024)) == (
        "Likely cause: the ranks are in different collectives and wait for each other: rank 512 in "
        "barrier (save, a.py:1), rank 0-511, 513-1023 in all_reduce (step, a.py:1)."
    )


def test_a_thousand_ranks_at_places_of_their_own_are_counted() -> None:
    stacks = {rank: FRAME.format(f"f{rank}", "all_reduce") for rank in range(1024)}
    cause = likely_cause(stacks, range(1024))
    assert cause.endswith("rank 7 in all_reduce (f7, a.py:1) and 1016 more.")
    silent = likely_cause({}, range(1024))
    assert "rank 0-1023 does not answer" in silent
