"""Checks of correct functions, errors for functions that cannot be checked, and shrunk batches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import verl_like
from tests.trainer.tools.check_loss.stand_ins import NOT_INSTALLED, few_batches, stand_in_for_verl
from trainer.cli import main as command
from trainer.tools.check_loss import BrokenRelation, check_loss
from trainer.tools.check_loss.foreign import TRAINERS
from trainer.tools.check_loss.relations import NAMES, RELATIONS
from trainer.tools.check_loss.subject import KINDS, subject_of
from verl_like.errors import ConfigError
from workers.losses.aggregate import agg_loss
from workers.losses.registry import POLICY_LOSSES

OURS = [
    (name, kind)
    for kind, of_kind in KINDS.items()
    for number, name in enumerate(of_kind)
    if of_kind[name] not in list(of_kind.values())[:number]
]
"""Losses and estimators without their second names."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    few_batches(monkeypatch)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("name", "kind"), OURS)
def test_our_losses_and_estimators_pass_all_checks(name: str, kind: str) -> None:
    of_kind = [relation.__name__ for relation in RELATIONS[kind]]
    skipped = {"finite_differences"} & {*subject_of(name, kind).exempt}
    assert check_loss(name, kind) == [relation for relation in of_kind if relation not in skipped]


def test_losses_with_a_detached_weight_are_exempt_from_finite_differences() -> None:
    exempt = {n for n in POLICY_LOSSES if subject_of(n, "policy").exempt}
    assert exempt == {"cispo", "dppo_kl", "dppo_tv", "gspo", "luspo"}


def good(old_logprobs, logprobs, advantages, action_mask, num_tokens, clip_ratio):
    ratio = (logprobs - old_logprobs).where(action_mask > 0, 0).clamp(-20, 20).exp()
    advantages = advantages.where(action_mask > 0, 0)
    free, bound = -advantages * ratio, -advantages * ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return agg_loss(
        torch.maximum(free, bound), action_mask, "token-mean", batch_num_tokens=num_tokens
    )


@pytest.mark.usefixtures("quick")
def test_parameters_of_other_frameworks_are_recognized_by_name() -> None:
    subject = subject_of(good)
    assert subject.kind == "policy"
    assert subject.reads == {
        *("old_log_prob", "log_prob", "advantages", "response_mask"),
        *("batch_num_tokens", "clip_ratio"),
    }
    assert "micro_batch_cut" in verl_like.check_loss(good)
    assert check_loss(good, loss_agg_mode="token-mean", clip_ratio=0.1)
    with pytest.raises(BrokenRelation, match=r"good with token-sum breaks declared_aggregation"):
        check_loss(good, loss_agg_mode="token-sum")


@pytest.mark.usefixtures("quick")
def test_a_value_loss_and_an_estimator_are_recognized_by_their_parameters() -> None:
    def value_loss(vpreds, returns, mask, **counts):
        return agg_loss((vpreds - returns) ** 2, mask, "seq-mean-token-mean", **counts)

    def estimate(rewards, mask, uid):
        return rewards * mask

    assert subject_of(value_loss).kind == "value"
    assert check_loss(value_loss)
    assert subject_of(estimate).kind == "estimator"


def test_an_unknown_setting_or_aggregation_is_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown loss_agg_mode 'token-men'.*'token-mean'"):
        check_loss(good, loss_agg_mode="token-men")
    with pytest.raises(ConfigError, match="good has no setting 'clip_ratoi'.*'clip_ratio'"):
        check_loss(good, clip_ratoi=0.1)
    with pytest.raises(ConfigError, match="rloo has no setting 'gamma'"):
        check_loss("rloo", gamma=0.9)


@pytest.mark.usefixtures("quick")
def test_positional_only_parameters_are_filled() -> None:
    def loss(log_prob, mask, /, *, batch_num_tokens):
        return agg_loss(-log_prob, mask, "token-mean", batch_num_tokens=batch_num_tokens)

    assert check_loss(loss)


def test_a_broken_relation_is_one_sentence_with_the_smallest_batch() -> None:
    def micro_batch_mean(log_prob, mask):
        return -log_prob.where(mask > 0, 0).sum() / mask.sum().clamp(1)

    with pytest.raises(BrokenRelation) as caught:
        check_loss(micro_batch_mean)
    assert caught.value.relation == "micro_batch_cut"
    assert caught.value.batch["response_mask"].shape == (2, 1)
    sentence, *columns = str(caught.value).splitlines()
    assert sentence.startswith("micro_batch_mean breaks micro_batch_cut: loss is ")
    assert "with the rows [[0], [1]]. Likely cause: each micro-batch" in sentence
    assert [line.split()[0] for line in columns] == ["log_prob", "response_mask"]


@pytest.mark.usefixtures("quick")
def test_a_custom_backward_is_compared_with_finite_differences() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0]  # and the factor 2?

    def squares(log_prob, mask, **counts):
        return agg_loss(Square.apply(log_prob.where(mask > 0, 0)), mask, "token-mean", **counts)

    def detached_weight(log_prob, mask, **counts):
        weighted = log_prob.clamp(-20, 20).exp().detach() * log_prob
        return agg_loss(-weighted, mask, "token-mean", **counts)

    with pytest.raises(BrokenRelation, match=r"breaks finite_differences: slope is"):
        check_loss(squares)
    assert "finite_differences" in check_loss(detached_weight)


def test_a_random_loss_is_rejected() -> None:
    def noisy(log_prob, mask):
        return (-log_prob * mask).sum() * torch.rand(())

    with pytest.raises(BrokenRelation, match="noisy breaks same_twice.*it draws random numbers"):
        check_loss(noisy)
    assert check_loss(noisy, skip=NAMES) == []


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("0.0", r"returns float: it must return one loss of shape \[\] that depends on log_prob"),
        ("None", "returns NoneType: it must return one loss"),
        ("(log_prob.sum(), -log_prob.sum())", r"returns a tensor \[\] with a gradient, a tensor "),
        (
            "log_prob.sum().detach()",
            r"returns a tensor \[\] without a gradient: it must return one loss",
        ),
        (
            "log_prob * 2",
            r"returns a tensor \[1, 3\] with a gradient: it must return one loss of shape \[\]",
        ),
        ("1 / 0", r"raises ZeroDivisionError on a batch \[\[0, 0, 1\]\]: division by zero"),
    ],
)
def test_a_wrong_return_value_or_an_exception_is_explained(returned: str, sentence: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def loss(log_prob, mask):\n    return {returned}", namespace)
    with pytest.raises(ConfigError, match=f"^loss {sentence}"):
        check_loss(namespace["loss"])


def test_a_function_that_cannot_be_checked_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("verl", "verl.trainer.ppo.core_algos"):
        monkeypatch.setitem(sys.modules, module, None)

    def scaled(log_prob, mask, teacher_logits):
        return log_prob.sum()

    def scores(rewards, mask):
        return rewards.sum(1)

    def reward(response, ground_truth):
        return float(response == ground_truth)

    cases = [
        (
            dict(target=scaled),
            r"scaled has the parameters \(log_prob, mask, teacher_logits\).* teacher_logits\. ",
        ),
        (dict(target=reward), r"reward reads ground_truth, response, so it is a reward function"),
        (
            dict(target=scores),
            r"scores returns a tensor \[1\] without a gradient: it must return \(adv",
        ),
        (dict(target=3), "3 is of the type int, not a function with parameters"),
        (
            dict(target="vanila"),
            "there is no loss or estimator 'vanila'. Did you mean 'vanilla'.*"
            r" Known: (?!.* gpg,.* gpg,).* Your own: FILE.py",
        ),
        (dict(target="gpg"), "gpg is of the kinds policy and estimator.*such as --kind policy"),
        (dict(target="verl:gspo"), "verl cannot be imported .*pip install verl==0.9.1"),
        (dict(target="trl:gpro"), "trl has no loss 'gpro'. Did you mean 'grpo'.* Known: dapo"),
    ]
    for arguments, sentence in cases:
        with pytest.raises(ConfigError, match=sentence):
            check_loss(**arguments)
    assert "same_twice" in check_loss(
        lambda log_prob, mask, teacher_logits: (-log_prob).where(mask > 0, 0).sum(),
        teacher_logits=1.0,
    )


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["verl-like", "check-loss", *arguments])
    command.main()


def test_the_command_prints_the_relations_that_hold_or_the_one_that_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["grpo", "--set", "norm_adv_by_std_in_grpo=false"], monkeypatch)
    assert "grpo: 11 relations hold: no_side_effects, same_twice" in capsys.readouterr().out

    file = tmp_path / "losses.py"
    file.write_text("def mine(log_prob, mask, scale):\n    return (-log_prob).mean() * scale\n")
    with pytest.raises(SystemExit, match=r"mine breaks prompt_tokens: gradient is -1.5, not 0"):
        run([f"{file}:mine", "--set", "scale=3"], monkeypatch)
    with pytest.raises(SystemExit, match="the kind policy has no scale. It has old_log_prob"):
        run([f"{file}:mine"], monkeypatch)


@pytest.mark.usefixtures("quick")
def test_verl_s_losses_receive_counts_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_verl(monkeypatch, {"vanilla": POLICY_LOSSES["vanilla"]})
    assert "data_parallel_split" in check_loss("verl:vanilla", clip_ratio_high=0.4)
    assert "reward_scale_and_shift" in check_loss("verl:rloo")
    with pytest.raises(ConfigError, match="verl:vanilla has no setting 'dro_bta'.*'dro_beta'"):
        check_loss("verl:vanilla", dro_bta=2.0)
    with pytest.raises(
        ConfigError, match="verl has no loss or estimator 'wrong'. Known: vanilla, sft, value, "
    ):
        check_loss("verl:wrong")


CUTS = {"micro_batch_cut", "data_parallel_split"}
NAN = {"nan_outside", "extreme_ratios"}
TRUE_ALARMS: dict[str, set[str]] = {
    **{f"trl:{name}": NAN for name in ("dapo", "grpo", "sapo", "luspo", "dr_grpo", "rloo")},
    **{"trl:bnpo": CUTS | NAN, "trl:cispo": {"nan_outside"}, "trl:vespo": {"nan_outside"}},
    **{f"trl:{name}": CUTS for name in ("aot", "aot_unpaired", "kto")},
    "trl:exo_pair": {"finite_numbers", "finite_differences", "extreme_ratios"},
    "trl:discopop": {"better_side"},
    **{f"verl:{n}": {"nan_outside", "all_masked"} for n in ("vanilla", "dppo_tv", "dppo_kl")},
    **{f"verl:{n}": {"nan_outside", "all_masked"} for n in ("gpg", "cispo", "gspo", "value")},
    **{"verl:sft": {"all_masked"}, "verl:opo": {"all_masked"}},
    "verl:sapo": {"nan_outside", "all_masked", "declared_aggregation"},
    "verl:kl_cov": CUTS | NAN | {"all_masked"},
    "verl:geo_mean": CUTS | NAN | {"declared_aggregation"},
    "verl:optimal_token_baseline": {"holes_in_the_mask", "reward_scale_and_shift"},
    "verl:tir_optimal_token_baseline": {"reward_scale_and_shift"},
}
"""Function of another framework -> the relations that it breaks; benchmarks/README.md says why."""
THEIRS = [f"trl:{name}" for kind in TRAINERS for name in TRAINERS[kind]] + [
    name for name in TRUE_ALARMS if "verl" in name
]
THEIRS += ["verl:grpo", "verl:grpo_vectorized", "verl:rloo", "verl:rloo_vectorized", "verl:remax"]


@pytest.mark.parametrize("name", THEIRS)
def test_another_framework_s_function_breaks_only_the_listed_relations(name: str) -> None:
    pytest.importorskip(name.partition(":")[0], reason=NOT_INSTALLED)
    broken, kind = TRUE_ALARMS.get(name, set()), "policy" if name == "verl:gpg" else None
    assert check_loss(name, kind, skip=[*broken])
    for relation in broken:
        with pytest.raises(BrokenRelation, match=f"{name}.* breaks {relation}: "):
            check_loss(name, kind, skip=[other for other in NAMES if other != relation])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dro", "policy_loss.dro_beta must be a positive value"),
        ("bypass_mode", "response_mask must contain at least one valid token"),
        ("grpo_passk", "Pass@k requires at least 2 samples per group"),
        *[(name, "The sum of the mask is one") for name in ("gae", "gdpo", "reinforce_plus_plus")],
    ],
)
def test_an_exception_of_another_framework_is_reported_with_the_batch(
    name: str, sentence: str
) -> None:
    pytest.importorskip("verl", reason=NOT_INSTALLED)
    with pytest.raises(ConfigError, match=f"verl:{name} raises ValueError on a batch .*{sentence}"):
        check_loss(f"verl:{name}")


def test_a_loss_that_ends_the_process_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "exits.py"
    signature = "loss(log_prob, old_log_prob, advantages, response_mask)"
    file.write_text(f"import sys\ndef {signature}:\n    sys.exit(0)\n")
    with pytest.raises(SystemExit, match=r"loss ends the process: sys.exit\(0\)"):
        run([f"{file}:loss"], monkeypatch)
    file.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(SystemExit, match=r"cannot be imported: it ends the process"):
        run([f"{file}:loss"], monkeypatch)
