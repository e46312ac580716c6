"""Samples are divided among processes: a fast batch goes to one, a slow one to several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from workers.rewards import scorer
from workers.rewards.channel import DriverEnd
from workers.rewards.outcome import LATE
from workers.rewards.process import FunctionSpec
from workers.rewards.scorer import Scorer

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


class Asked:
    """A scorer of the function above, and the texts that it was called with."""

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
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "usable_cores", lambda: 2)
        made = Asked(tmp_path_factory.mktemp("asked"))
    yield made
    made.scorer.stop()


def test_what_was_answered_before_a_process_ended_is_not_asked_again(asked: Asked) -> None:
    outcomes = asked.score("a", "b", "c", "end", "d", "e")
    assert [outcome[0] for outcome in outcomes] == [1.0, 1.0, 1.0, None, 1.0, 1.0]
    assert outcomes[3][2] == "the reward process ended with exit code 4"
    assert asked.calls() == {"a": 1, "b": 1, "c": 1, "end": 2, "d": 1, "e": 1}


def test_a_sample_that_takes_long_holds_up_none_of_the_others(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "SLOW_S", 0.1)
    outcomes = asked.score("slow", *["fine"] * 10)
    assert [outcome[0] for outcome in outcomes] == [1.0] * 11
    first, *others = [outcome[1]["pid"] for outcome in outcomes]
    assert first not in others
    assert asked.calls() == {"slow": 1, "fine": 10}


def test_of_a_sample_only_what_the_function_reads_is_sent(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.score("warm")
    sent: list[Any] = []
    send = DriverEnd.send

    def noted(end: DriverEnd, message: Any, deadline: float) -> None:
        sent.append(message)
        send(end, message, deadline)

    monkeypatch.setattr(DriverEnd, "send", noted)
    (outcome,) = asked.scorer.score([{"solution_str": "fine", "raw_prompt": "long", "uid": "0-0"}])
    assert outcome[0] == 1.0
    assert sent == [[(0, {"solution_str": "fine"})]]


def test_a_batch_that_comes_when_all_is_given_up_is_not_begun(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.scorer.give_up()
    ((score, _, reason),) = asked.score("fine")
    assert (score, reason) == (None, LATE)
    assert not asked.calls()
