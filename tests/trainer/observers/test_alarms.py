"""A recipe's rule raises an alarm, which is printed less and less often while it lasts."""

from __future__ import annotations

import json
from collections.abc import Mapping

from trainer.observers.alarms import (
    Alarms,
    AlarmTexts,
    skipped_updates,
    unchanged_weights,
)
from trainer.sft.step import SFTTrainer


def doubled(metrics: Mapping[str, float], first: dict[str, float]) -> AlarmTexts:
    """Raise an alarm for a loss that is twice its first value."""
    if metrics["loss"] >= 2 * first.setdefault("loss", metrics["loss"]):
        yield "doubled", f"the loss is {metrics['loss']:g}, {first['loss']:g} at first"


def alarms_of_a_loss(first: float = 1.0) -> Alarms:
    alarms = Alarms([doubled])
    assert alarms.check({"loss": first}, 1) == []
    return alarms


def test_an_alarm_that_lasts_is_printed_less_and_less_often() -> None:
    alarms = alarms_of_a_loss()
    printed = [step for step in range(2, 100) if alarms.check({"loss": 2.0}, step)]
    assert printed == [2, 12, 32, 72]


def test_a_resumed_run_restores_first_values_and_printed_alarms() -> None:
    alarms = alarms_of_a_loss(first=3.0)
    assert alarms.check({"loss": 6.0}, 2)

    resumed = Alarms([doubled])
    resumed.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    assert [step for step in range(3, 40) if resumed.check({"loss": 6.5}, step)] == [12, 32]


def test_a_repeated_step_does_not_repeat_its_alarm() -> None:
    alarms = alarms_of_a_loss()
    at_checkpoint = alarms.state_dict()
    assert alarms.check({"loss": 2.0}, 5)
    alarms.load_state_dict(at_checkpoint)
    assert alarms.check({"loss": 2.0}, 5) == []


def test_a_recipe_on_rows_reports_skipped_updates() -> None:
    assert SFTTrainer.recipe.alarm_rules == (skipped_updates, unchanged_weights)
    (text,) = Alarms(SFTTrainer.recipe.alarm_rules).check(
        {"sft/skipped_steps": 2.0, "sft/loss": 1.0}, 3
    )
    assert "the sft skipped 2 of its updates" in text
    assert text.endswith(
        "Look at logs/sft-0.log, which names the samples, and at the learning rate."
    )
