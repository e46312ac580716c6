"""Which makers generate for a validation, and that all of them do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, calls
from tests.trainer.detached.test_run import detached
from trainer import load_config
from trainer.detached.maker import at_once, replace_lost, validators_of
from trainer.detached.recipe import DETACHED
from verl_like.errors import WorkerDiedError


def some_makers(num: int) -> list[Any]:
    return [SimpleNamespace(number=number, has_ended=False) for number in range(num)]


def numbers_of(makers: list[Any]) -> list[int]:
    return [maker.number for maker in makers]


def test_every_maker_with_the_rollout_of_the_first_one_that_lives_validates() -> None:
    needed = ("data.train_files=x", "actor_rollout_ref.model.path=y", "detached.makers=4")
    config = load_config([*needed, "detached.maker_settings.1={name: hf}"], DETACHED)
    makers = some_makers(4)
    assert numbers_of(validators_of(makers, config)) == [0, 2, 3]

    makers[0].has_ended = True
    assert numbers_of(validators_of(makers, config)) == [1]

    makers[1].has_ended = True
    assert numbers_of(validators_of(makers, config)) == [2, 3]


def test_each_maker_makes_a_part_of_a_validation(tiny_dir: Path, tmp_path: Path) -> None:
    validated = ("trainer.test_freq=1", f"data.val_files={tiny_dir}/few.parquet")
    settings = ("detached.topology=2m1t", "trainer.total_training_steps=1", *POLICY_ALONE)
    folder = detached(tiny_dir, tmp_path, *settings, *validated)
    found = calls(folder, "generate_sequences")
    roles = Counter(call["cat"] for call in found if call["args"]["stage"] == "testing")
    assert roles["rollout"] == roles["rollout_1"] > 0


def test_makers_that_live_are_reached_where_another_is_not() -> None:
    makers, reached = some_makers(3), []

    def reach(maker: Any) -> None:
        if maker.number == 0:
            raise WorkerDiedError("maker 0")
        reached.append(maker.number)

    with pytest.raises(WorkerDiedError, match="maker 0"):
        at_once(reach, makers)
    assert sorted(reached) == [1, 2]


def test_those_that_lost_a_process_are_replaced_and_else_the_first_knows_more() -> None:
    replaced: list[int] = []
    taken: list[int] = []
    dead = {1}
    makers = some_makers(3)
    for maker in makers:
        maker.replace = lambda error, number=maker.number: replaced.append(number) or number == 1
        maker.take_weights = lambda number=maker.number: taken.append(number)
    losses: Any = SimpleNamespace(is_alive=lambda number: number not in dead)
    replace_lost(makers, losses, WorkerDiedError("a process is gone"))
    assert (replaced, taken) == ([1], [1])

    dead.clear()
    replace_lost(makers, losses, WorkerDiedError("a trainer's"))
    assert (replaced, taken) == ([1, 0], [1])
