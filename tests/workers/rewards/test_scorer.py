"""Samples are divided among processes: a fast batch goes to one, a slow one to several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_like.process.pool import ProcessPool
from workers.rewards import scorer
from workers.rewards.outcome import LATE
from workers.rewards.scorer import FunctionSpec, Scorer

FUNCTION = """
import os, time

def act(solution_str):
    with open(NOTE, "a") as note:
        note.write(solution_str + "\\n")
    if solution_str == "end":
        os._exit(4)
    if solution_str == "slow":
        time.sleep(1.5)
    return {"score": 1.0, "pid": os.getpid()}
"""


class LoggedScorer:
    """A scorer of the function above, which logs the texts of its calls."""

    def __init__(self, folder: Path) -> None:
        self._note = folder / "note"
        path = folder / "function.py"
        path.write_text(f"NOTE = {str(self._note)!r}\n{FUNCTION}")
        self.scorer = Scorer(FunctionSpec(str(path), "act"), 60.0)

    def score(self, *texts: str) -> list[Any]:
        self._note.write_text("")
        return self.scorer.score([{"solution_str": text} for text in texts])

    def calls(self) -> Counter[str]:
        return Counter(self._note.read_text().split())


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggedScorer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "usable_cores", lambda: 2)
        logged = LoggedScorer(tmp_path_factory.mktemp("logged"))
    yield logged
    logged.scorer.stop()


def test_samples_scored_before_a_process_ended_are_not_scored_again(logged: LoggedScorer) -> None:
    outcomes = logged.score("a", "b", "c", "end", "d", "e")
    assert [outcome[0] for outcome in outcomes] == [1.0, 1.0, 1.0, None, 1.0, 1.0]
    assert outcomes[3][2] == "the reward process ended with exit code 4"
    assert logged.calls() == {"a": 1, "b": 1, "c": 1, "end": 2, "d": 1, "e": 1}


def test_a_slow_sample_delays_no_other_sample(
    logged: LoggedScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "ADD_PROCESS_EVERY_S", 0.1)
    outcomes = logged.score("slow", *["fine"] * 10)
    assert [outcome[0] for outcome in outcomes] == [1.0] * 11
    slow_pid, *fast_pids = [outcome[1]["pid"] for outcome in outcomes]
    assert slow_pid not in fast_pids
    assert logged.calls() == {"slow": 1, "fine": 10}


def test_only_the_fields_that_the_function_reads_are_sent(
    logged: LoggedScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged.score("warm")
    sent: list[Any] = []
    send = ProcessPool.send

    def recorded(pool: ProcessPool, process: Any, messages: Any, *deadlines: float) -> None:
        sent.extend(messages.values())
        send(pool, process, messages, *deadlines)

    monkeypatch.setattr(ProcessPool, "send", recorded)
    (outcome,) = logged.scorer.score([{"solution_str": "fine", "raw_prompt": "long", "uid": "0-0"}])
    assert outcome[0] == 1.0
    assert sent == [{"solution_str": "fine"}]


def test_a_batch_after_giving_up_is_not_scored(tmp_path: Path) -> None:
    logged = LoggedScorer(tmp_path)
    logged.scorer.give_up()
    ((score, _, reason),) = logged.score("fine")
    assert (score, reason) == (None, LATE)
    assert not logged.calls()
