"""The alarms of a PPO run, each with a hint."""

from __future__ import annotations

import math
import re

import pytest

from trainer.observers.alarms import ALARM_RULES, Alarms


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"actor/skipped_steps": 2.0}, "the actor skipped 2 of its updates.*actor-0.log"),
        (
            {"critic/skipped_steps": 1.0},
            "critic skipped 1 of its updates.*rewards and advantages, and at the",
        ),
        ({"actor/ppo_kl": 0.3}, "actor/ppo_kl is 0.3.*actor.optim.lr"),
        ({"actor/reward_kl_penalty": 10.5}, "actor/reward_kl_penalty is 10.5.*reference"),
        ({"actor/reward_kl_penalty": -11.0}, "actor/reward_kl_penalty is -11.*the KL coefficient"),
        ({"training/rollout_probs_diff_mean": 0.2}, "rollout.dtype"),
    ],
)
def test_an_alarm_names_the_number_and_what_to_check(
    metrics: dict[str, float], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        assert len(Alarms(ALARM_RULES).check(metrics, 7)) == 1
    (record,) = caplog.records
    assert record.getMessage().startswith("alarm in step 7: ")
    assert re.search(words, record.getMessage())


def test_numbers_within_their_bands_raise_no_alarm() -> None:
    quiet = {
        "actor/skipped_steps": 0.0,
        "actor/entropy": 1.0,
        "actor/ppo_kl": -0.01,
        "actor/kl_loss": 0.2,
        "actor/reward_kl_penalty": 9.9,
        "training/rollout_probs_diff_mean": 0.004,
        "actor/lr": 1e-6,
    }
    alarms = Alarms(ALARM_RULES)
    assert [alarms.check(quiet, step) for step in range(1, 5)] == [[]] * 4
    assert Alarms(ALARM_RULES).check({}, 1) == []
    assert alarms.state_dict() == {"first": {"entropy": 1.0}, "next": {}}


def test_scores_that_are_zero_for_three_steps_raise_an_alarm() -> None:
    alarms, zero = Alarms(ALARM_RULES), {"critic/score/min": 0.0, "critic/score/max": 0.0}
    assert alarms.check(zero, 1) == []
    assert alarms.check(zero | {"critic/score/max": 1.0}, 2) == []
    assert [alarms.check(zero, step) for step in (3, 4)] == [[], []]
    (text,) = alarms.check(zero, 5)
    assert "every sample of the last 3 steps had the score 0" in text
    taught = Alarms(ALARM_RULES)
    metrics = zero | {"distillation/reverse_kl": 0.1}
    assert [taught.check(metrics, step) for step in range(9)] == [[]] * 9


def test_entropy_is_compared_with_its_first_value() -> None:
    alarms = Alarms(ALARM_RULES)
    assert alarms.check({"actor/entropy": math.nan}, 1) == []
    assert alarms.check({"actor/entropy": 2.0}, 2) == []
    assert alarms.check({"actor/entropy": 0.11}, 3) == []
    (gone,) = alarms.check({"actor/entropy": 0.09}, 4)
    assert "0.09 (initially 2): the policy repeats one response" in gone
    (grown,) = alarms.check({"actor/entropy": 6.1}, 5)
    assert "becomes random" in grown


def test_an_update_that_changes_almost_nothing_raises_an_alarm() -> None:
    name = "actor/weights_changed_fraction"
    alarms = Alarms(ALARM_RULES)
    assert alarms.check({name: 0.9, "actor/lr": 1e-6}, 1) == []
    assert alarms.check({name: 0.0, "actor/lr": 1e-6, "actor/skipped_steps": 1.0}, 2) != []
    assert alarms.check({name: 0.0, "actor/lr": 0.0}, 3) == []
    assert alarms.check({name: 0.001, "actor/lr": 1e-9}, 4) == []  # the end of a schedule
    (text,) = alarms.check({name: 0.001, "actor/lr": 1e-6}, 5)
    assert "changed 0.10% of its weights at a learning rate of 1e-06" in text
