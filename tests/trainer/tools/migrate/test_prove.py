"""A migrated command next to the framework's own functions, on a stand-in for verl."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import pytest

from tests.trainer.tools.check_loss.stand_ins import NOT_INSTALLED, few_batches, stand_in_for_verl
from trainer.cli.main import main
from trainer.tools.migrate.prove import prove
from trainer.tools.migrate.systems import migrate
from trainer.tools.migrate.translation import Translation
from workers.losses.registry import POLICY_LOSSES

VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=x actor_rollout_ref.model.path=y "
    "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2"
)


def proof(system: str, line: str) -> str:
    (done,) = migrate(system, shlex.split(line))
    return prove(system, done)


def test_the_command_prints_a_proof_below_the_translation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in_for_verl(monkeypatch, {"vanilla": POLICY_LOSSES["vanilla"]})
    words = [*shlex.split(VERL), "actor_rollout_ref.actor.clip_ratio_high=0.28", "--prove"]
    monkeypatch.setattr(sys, "argv", ["verl-like", "migrate", "verl", *words])
    main()
    text = capsys.readouterr().out
    assert text.startswith("verl-like ppo")
    assert text.splitlines()[-3:] == [
        "# Proof:",
        "#   loss verl:vanilla: equal to 1e-6 on 24 batches",
        "#   estimator verl:grpo: equal to 1e-6 on 24 batches",
    ]


def test_the_key_that_causes_a_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    few_batches(monkeypatch)

    def wider(*columns: Any, **counts: Any) -> Any:
        *columns, config = columns
        config.clip_ratio_high = 1.0
        return POLICY_LOSSES["vanilla"](*columns, config, **counts)

    def over_rows(*columns: Any, **counts: Any) -> Any:
        *columns, _, config = columns
        return POLICY_LOSSES["vanilla"](*columns, "seq-mean-token-mean", config, **counts)

    stand_in_for_verl(monkeypatch, {"vanilla": wider})
    text = proof("verl", VERL)
    assert "different on" in text
    assert "With clip_ratio_high=1.0 they are equal to 1e-6 on 4 batches" in text
    stand_in_for_verl(monkeypatch, {"vanilla": over_rows})
    text = proof("verl", VERL)
    assert "With loss_agg_mode=seq-mean-token-mean they are equal to 1e-6 on 4 batches" in text


def test_an_estimator_has_the_settings_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    few_batches(monkeypatch)
    stand_in_for_verl(monkeypatch, {"vanilla": POLICY_LOSSES["vanilla"]})
    gae = f"{VERL} algorithm.adv_estimator=gae critic.model.path=y algorithm.lam=0.9"
    (done,) = migrate("verl", shlex.split(gae))
    assert "estimator verl:gae: equal to 1e-6 on 4 batches" in prove("verl", done)
    done.settings["algorithm.lam"] = "0.8"
    assert "estimator verl:gae: equal to 1e-6 on 0 batches; different on 4" in prove("verl", done)


def test_without_the_framework_only_the_translation_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("verl", "verl.trainer.ppo.core_algos"):
        monkeypatch.setitem(sys.modules, name, None)
    words = ["verl-like", "migrate", "verl", *shlex.split(VERL), "--prove"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="verl cannot be imported .*pip install verl==0.9.1"):
        main()
    assert capsys.readouterr().out.startswith("verl-like ppo")


def test_a_loss_that_is_no_function_has_no_proof() -> None:
    words = "has no function of this loss that can be called by itself"
    assert prove("openrlhf", Translation()) == f"Proof: openrlhf {words}"
    data = "--model_name_or_path m --dataset_name a/b"
    for line in (f"trl rloo {data} --reward_funcs r", f"cpo.py {data}", f"orpo.py {data}"):
        assert proof("trl", line) == f"Proof: trl {words}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trl grpo", "loss trl:dapo: equal to 1e-6 on 18 batches"),
        ("trl grpo --loss_type sapo", "loss trl:sapo: equal to 1e-6 on 18 batches"),
        ("trl grpo --loss_type cispo", "With epsilon=1"),
        (
            "trl grpo --loss_type grpo --beta 0.04",
            "With use_bias_correction_kl=False they are equal to 1e-6 on 15 batches; different on "
            "3: loss is 0.107385, not 0.243627, as theirs (in each of these a token's KL exceeds",
        ),
        ("trl dpo --beta 0.2", "loss trl:dpo: equal to 1e-6 on 24 batches"),
        ("trl dpo --loss_type ipo", "loss trl:ipo: equal to 1e-6 on 24 batches"),
        ("trl kto --desirable_weight 1.5", "loss trl:kto: equal to 1e-6 on 24 batches"),
        ("trl reward --center_rewards_coefficient 0.1", "trl:reward: equal to 1e-6 on 24 batches"),
        ("trl sft", "loss trl:sft: equal to 1e-6 on 18 batches"),
    ],
)
def test_a_migrated_command_has_the_losses_of_trl(line: str, words: str) -> None:
    pytest.importorskip("trl", reason=NOT_INSTALLED)
    assert words in proof("trl", f"{line} --model_name_or_path y --dataset_name z")


@pytest.mark.parametrize(
    "settings",
    [
        "clip_ratio_high=0.28",
        "policy_loss.loss_mode=gspo",
        "use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01",
    ],
)
def test_a_migrated_command_has_the_functions_of_verl(settings: str) -> None:
    pytest.importorskip("verl", reason=NOT_INSTALLED)
    text = proof("verl", f"{VERL} actor_rollout_ref.actor.{settings}")
    assert "different" not in text
    assert text.count("equal to 1e-6 on 24 batches") == 2


def test_rows_without_a_token_are_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    few_batches(monkeypatch)

    def over_all_rows(*columns: Any, **counts: Any) -> Any:
        loss, metrics = POLICY_LOSSES["vanilla"](*columns, **counts)
        return loss * columns[3].any(dim=1).double().mean(), metrics

    stand_in_for_verl(monkeypatch, {"vanilla": over_all_rows})
    words = "(each of these has a row without a token, which only their function counts)"
    assert words in proof("verl", VERL)
