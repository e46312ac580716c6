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
from trainer.detached.recipe import DETACHED
from trainer.detached.validators import LostValidators, at_once, validators_of
from verl_like.errors import WorkerDiedError


def some_makers(num: int) -> list[Any]:
    return [SimpleNamespace(number=number, has_ended=False, num_losses=0) for number in range(num)]


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


def test_those_that_lost_a_process_are_looked_after_and_else_the_first_knows_more() -> None:
    looked_after: list[int] = []
    dead = {1}
    makers = some_makers(3)
    for maker in makers:
        maker.look_after = lambda error, before, maker=maker: looked_after.append(maker.number)
    losses: Any = SimpleNamespace(is_alive=lambda number: number not in dead)
    lost = LostValidators(makers, losses)
    makers[2].num_losses = 1

    lost.look_after(WorkerDiedError("a process is gone"))
    assert looked_after == [1, 2]

    dead.clear()
    LostValidators(makers, losses).look_after(WorkerDiedError("a trainer's"))
    assert looked_after == [1, 2, 0]
