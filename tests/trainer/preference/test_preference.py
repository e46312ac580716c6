"""Preference training of the tiny model: learning, checkpoints, resumes and errors."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.runs import numbers, overrides_on_rows, write_jsonl
from trainer import run
from trainer.config.compose import load_config
from trainer.data.lm_rows import LMRow
from trainer.data.pairs import read_labeled, read_pairs
from trainer.data.prompts import load_tokenizer
from trainer.preference.recipe import DPO
from trainer.preference.step import FILE
from verl_like.errors import CheckpointError, ConfigError

PAIRS = [{"prompt": f"say {x}", "chosen": f"ab{x}", "rejected": "cd"} for x in "efghijklmn"]
VAL = [{"prompt": "say k", "chosen": "ab", "rejected": "d"}, PAIRS[0]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    return {
        "train": write_jsonl(folder / "train.jsonl", PAIRS),
        "val": write_jsonl(folder / "val.jsonl", VAL),
    }


def settings_of(tiny_dir: Path, files: dict[str, Path], folder: Path, *more: str) -> list[str]:
    short = ("data.train_batch_size=5", "trainer.total_training_steps=4")
    return overrides_on_rows(tiny_dir, {"train": files["train"]}, folder, *short, *more)


def validating(files: dict[str, Path]) -> list[str]:
    return [f"data.val_files={files['val']}", "trainer.test_freq=2"]


EXPORT = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"


def trained(*settings: str) -> list[dict[str, float]]:
    config = load_config(settings, DPO)
    run(config)
    return numbers(Path(config.trainer.default_local_dir))


@pytest.fixture(scope="module")
def unbroken(
    tiny_dir: Path, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run folder of DPO: two epochs of ten pairs, five per step."""
    folder = tmp_path_factory.mktemp("unbroken")
    trained(
        *settings_of(tiny_dir, files, folder, *validating(files), "trainer.save_freq=2", EXPORT)
    )
    return folder


def log_probs_by_hand(model_folder: Path, rows: list[LMRow]) -> list[float]:
    """Return the sum over each response's tokens, row by row, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    sums = []
    for row in rows:
        ids = torch.from_numpy(row.ids)
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        chosen = log_probs.gather(-1, ids[1:, None])[:, 0]
        sums.append(float(chosen[torch.from_numpy(row.in_loss[1:])].double().sum()))
    return sums


def test_pairs_are_learned(unbroken: Path) -> None:
    steps = [line for line in numbers(unbroken) if "train/loss" in line]
    assert steps[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["train/kl/row"] == pytest.approx(0, abs=1e-5)
    assert len(steps) == 4
    assert steps[-1]["train/loss"] < math.log(2)
    assert steps[-1]["train/rewards/margin"] > 0
    assert steps[-1]["train/rewards/accuracy"] >= 0.8
    assert steps[0]["train/lengths/chosen"] == 4
    assert steps[0]["train/lengths/rejected"] == 3


def test_validation_metrics_equal_a_computation_by_hand(
    unbroken: Path, tiny_dir: Path, files: dict[str, Path]
) -> None:
    tokenizer = load_tokenizer(f"{tiny_dir}/model")
    pairs = read_pairs("data.val_files", str(files["val"]), tokenizer, 32)
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    before = log_probs_by_hand(tiny_dir / "model", sides)
    after = log_probs_by_hand(unbroken / "model", sides)
    ratios = [new - old for new, old in zip(after, before, strict=True)]
    gaps = [0.1 * (ratios[0] - ratios[1]), 0.1 * (ratios[2] - ratios[3])]

    last = [line for line in numbers(unbroken) if "val/loss" in line][-1]
    losses = [math.log1p(math.exp(-gap)) for gap in gaps]
    assert last["val/loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    assert last["val/rewards/margin"] == pytest.approx(sum(gaps) / 2, abs=1e-5)
    assert last["val/kl/row"] == pytest.approx(sum(ratios) / 4, abs=1e-4)
    num_tokens = sum(int(side.in_loss[1:].sum()) for side in sides)
    assert last["val/kl/token"] == pytest.approx(sum(ratios) / num_tokens, abs=1e-4)
    assert last["val/log_probs/chosen"] == pytest.approx((after[0] + after[2]) / 2, abs=1e-4)


def resuming(settings: list[str], start: Path) -> list[str]:
    unsaved = [key for key in settings if "save_" not in key]
    return [*unsaved, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}"]


@pytest.mark.parametrize("has_table", [True, False])
def test_a_resumed_run_repeats_the_numbers(
    has_table: bool, unbroken: Path, tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    start = unbroken / "global_step_2"
    if not has_table:
        shutil.copytree(start, tmp_path / "elsewhere" / start.name)
        start = tmp_path / "elsewhere" / start.name
    settings = settings_of(tiny_dir, files, tmp_path / "again", *validating(files))
    again = trained(*resuming(settings, start))
    assert again == [line for line in numbers(unbroken) if line["step"] > 2]
    events = (tmp_path / "again" / "timeline.json").read_text(encoding="utf-8")
    assert ("compute_ref_log_prob" in events) is not has_table


def test_a_run_that_names_the_earlier_modules_of_roles_is_resumed(
    unbroken: Path, tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    earlier = {"role_workers.preference": "workers.roles.preference.PreferenceWorker"}
    start = tmp_path / "earlier" / "global_step_2"
    shutil.copytree(unbroken / "global_step_2", start)
    marker = json.loads((start / "commit.json").read_text(encoding="utf-8"))
    assert earlier.keys() <= marker["config"].keys()
    marker["config"] |= earlier
    (start / "commit.json").write_text(json.dumps(marker), encoding="utf-8")
    settings = settings_of(tiny_dir, files, tmp_path / "again", *validating(files))
    settings += [f"{key}={value}" for key, value in earlier.items()]  # as in its config.yaml
    again = trained(*resuming(settings, start))
    assert again == [line for line in numbers(unbroken) if line["step"] > 2]


@pytest.fixture(scope="module")
def other_model(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_dir / "model", folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(folder)
    return folder


def first_step(unbroken: Path, folder: Path, settings: list[str]) -> dict[str, float]:
    """Run a step in a new folder that has the reference's log-probs of `unbroken`."""
    folder.mkdir()
    shutil.copy(unbroken / FILE, folder / FILE)
    return trained(*settings, "trainer.total_training_steps=1")[0]


def test_changed_rows_are_rejected_by_a_resume_and_scored_by_a_new_run(
    unbroken: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    reordered = {"train": write_jsonl(tmp_path / "train.jsonl", PAIRS[::-1])}
    settings = settings_of(tiny_dir, reordered, tmp_path / "resumed")
    with pytest.raises(CheckpointError, match=r"rows of data.train_files have changed"):
        trained(*resuming(settings, unbroken / "global_step_2"))

    new = tmp_path / "new"
    first = first_step(unbroken, new, settings_of(tiny_dir, reordered, new))
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_other_weights_are_rejected_by_a_resume_and_used_by_a_new_run(
    unbroken: Path, tiny_dir: Path, other_model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    other = f"ref.model.path={other_model}"
    settings = settings_of(tiny_dir, files, tmp_path / "resumed", other)
    with pytest.raises(CheckpointError, match=r"weights or model.compute_dtype have changed"):
        trained(*resuming(settings, unbroken / "global_step_2"))

    new = tmp_path / "new"
    first = first_step(unbroken, new, settings_of(tiny_dir, files, new, other))
    assert abs(first["train/kl/row"]) > 0.01


def test_other_validation_rows_are_scored_by_the_initial_weights(
    unbroken: Path, tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    reordered = {"val": write_jsonl(tmp_path / "val.jsonl", VAL[::-1])}
    settings = settings_of(tiny_dir, files, tmp_path / "again", *validating(reordered))
    last = trained(*resuming(settings, unbroken / "global_step_2"))[-1]
    expected = {name: x for name, x in numbers(unbroken)[-1].items() if name.startswith("val/")}
    assert {name: last[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_a_damaged_file_is_named(tiny_dir: Path, files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=rf"{FILE} is damaged .* Remove it"):
        trained(*settings_of(tiny_dir, files, tmp_path))


@pytest.mark.parametrize("loss", ["hinge", "orpo", "kto"])
def test_every_loss_learns(
    loss: str, tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    more = (f"loss={loss}", "trainer.total_training_steps=3", "data.train_batch_size=10")
    beta = () if loss == "orpo" else ("beta=1",)
    steps = trained(*settings_of(tiny_dir, files, tmp_path, *more, *beta))
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    assert steps[-1]["train/rewards/margin"] > steps[0]["train/rewards/margin"]
    assert ("train/kl/row" in steps[0]) == (loss != "orpo")
    assert (tmp_path / FILE).exists() == (loss != "orpo")


def test_the_sft_loss_is_a_mean_over_all_tokens_of_chosen_responses(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """As in TRL's DPOTrainer with loss_type=[sigmoid, sft], for any number of passes."""
    rows = [{"prompt": "say a", "chosen": "ab" * n, "rejected": "cd"} for n in (1, 2, 5, 12)]
    files = {"train": write_jsonl(tmp_path / "rows.jsonl", rows)}
    files["val"] = files["train"]
    more = ("sft_coef=0.4", "sft_agg_mode=token-mean", "data.train_batch_size=4")
    more += ("trainer.total_training_steps=1", *validating(files))
    passes = ("data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=1")
    steps = [
        trained(*settings_of(tiny_dir, files, tmp_path / name, *more, *words))
        for name, words in (("one", ()), ("four", passes))
    ]
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    pairs = read_pairs("data.train_files", str(files["train"]), tokenizer, 32)
    chosen = [row.chosen for row in pairs]
    log_probs = log_probs_by_hand(tiny_dir / "model", chosen)
    nll = -sum(log_probs) / sum(int(row.in_loss[1:].sum()) for row in chosen)
    expected = math.log(2) + 0.4 * nll  # the reference is the model
    for numbers_of_run in steps:
        assert numbers_of_run[-1]["train/loss"] == pytest.approx(expected, abs=1e-4)
        assert numbers_of_run[0]["val/loss"] == pytest.approx(expected, abs=1e-4)


def test_without_a_reference_no_table_is_written(
    tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    more = ("reference_free=true", "trainer.total_training_steps=2", *validating(files))
    steps = trained(*settings_of(tiny_dir, files, tmp_path, *more))
    assert not (tmp_path / FILE).exists()
    assert "train/kl/row" not in steps[-1]
    before, last = ([x for x in steps if "val/loss" in x][place] for place in (0, -1))
    gap = before["val/log_probs/chosen"] - before["val/log_probs/rejected"]
    assert before["val/rewards/margin"] == pytest.approx(0.1 * gap, abs=1e-4)
    assert last["val/loss"] < before["val/loss"]


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_margins_are_in_the_loss_or_get_a_notice(
    loss: str, tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [row | {"margin": 1.5} for row in PAIRS])
    files = {"train": rows, "val": rows}
    more = (f"loss={loss}", "trainer.total_training_steps=1", *validating(files))
    with caplog.at_level(logging.INFO):
        steps = trained(*settings_of(tiny_dir, files, tmp_path / "run", *more))
    notice = "loss=ipo does not read the margins of pairs"
    if loss == "ipo":
        assert caplog.text.count(f"data.train_files: {notice}") == 1
        return
    assert notice not in caplog.text
    expected = pytest.approx(math.log1p(math.exp(1.5)), abs=1e-5)
    first, before = (next(x[y] for x in steps if y in x) for y in ("train/loss", "val/loss"))
    assert (first, before) == (expected, expected)


def test_the_kl_of_mismatched_rows_equals_a_computation_by_hand(
    tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    more = ("loss=kto", "trainer.total_training_steps=2", "data.train_batch_size=20")
    saving = ("trainer.save_freq=1", EXPORT)
    last = trained(*settings_of(tiny_dir, files, tmp_path, *more, *saving))[-1]

    tokenizer = load_tokenizer(f"{tiny_dir}/model")
    rows = read_labeled("data.train_files", str(files["train"]), tokenizer, 32, 1)
    responses = [row.mismatched for row in rows]
    model = tmp_path / "global_step_1" / "preference" / "huggingface"
    before, after = (log_probs_by_hand(folder, responses) for folder in (tiny_dir / "model", model))
    ratios = [new - old for new, old in zip(after, before, strict=True)]
    assert last["train/kl/mismatched"] == pytest.approx(max(0, sum(ratios) / 20), abs=1e-4)
    assert last["train/desirable"] == 0.5


def test_a_separate_reference_has_its_own_role(
    unbroken: Path, tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    separate = [f"ref.model.path={tiny_dir}/model", "placement=split", "trainer.n_gpus_per_node=2"]
    short = "trainer.total_training_steps=2"
    steps = trained(*settings_of(tiny_dir, files, tmp_path, *separate, short))
    expected = [
        {name: value for name, value in line.items() if not name.startswith("val/")}
        for line in numbers(unbroken)
        if line["step"] in (1, 2)
    ]
    assert steps == expected
    assert "ref_pool" in (tmp_path / "placement.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("settings", "notice"),
    [
        (
            ["loss=orpo", "beta=0.2"],
            "beta .*: the preference loss that loss names has no parameter",
        ),
        (["loss=kto", "sft_coef=1"], "sft_coef .*: the loss learns rows with a label, not pairs"),
        (["loss=simpo", "ref.model.path=x"], "ref.model.path .*: the loss uses no reference model"),
        (["loss=kto", "reference_free=true"], "the loss compares no pairs with a reference"),
    ],
)
def test_a_key_that_the_loss_does_not_read_has_no_effect(
    settings: list[str],
    notice: str,
    tiny_dir: Path,
    files: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load_config(settings_of(tiny_dir, files, tmp_path, *settings), DPO)
    assert re.search(notice, caplog.text)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["loss=dop"], r"unknown preference loss 'dop'"),
        (["label_smoothing=0.5"], r"label_smoothing=0.5.*below 0.5"),
        (["loss=kto", "desirable_weight=0", "undesirable_weight=0"], r"nothing would be learned"),
        (
            ["data.max_token_len_per_gpu=63"],
            r"=32: a pair of rows of up to 32 tokens each .*=63 tokens. Set .* to 31 or .* to 64",
        ),
    ],
)
def test_settings_that_cannot_work_are_rejected(
    settings: list[str], problem: str, tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(settings_of(tiny_dir, files, tmp_path, *settings), DPO)


def test_the_parameters_of_a_users_loss_say_what_it_reads(
    tiny_dir: Path, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "my_preference_losses.py"
    module.write_text(
        "def closer(log_probs, beta): return beta * (log_probs[:, 1] - log_probs[:, 0])\n"
        "def wrong(log_probs, temperature): return log_probs[:, 0]\n"
        "def unpaired(log_probs, desirable): return log_probs\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    closer = ("loss=my_preference_losses.closer", "data.train_batch_size=10")
    short = "trainer.total_training_steps=2"
    first, last = trained(*settings_of(tiny_dir, files, tmp_path / "run", *closer, short))
    assert last["train/loss"] < first["train/loss"]
    with pytest.raises(ConfigError, match=r"unknown parameter 'temperature'"):
        load_config(settings_of(tiny_dir, files, tmp_path, "loss=my_preference_losses.wrong"), DPO)
    with pytest.raises(ConfigError, match=r"'desirable' but not 'ref_log_probs'"):
        load_config(
            settings_of(tiny_dir, files, tmp_path, "loss=my_preference_losses.unpaired"), DPO
        )


def test_a_step_with_one_label_shows_no_metrics_of_the_other() -> None:
    from trainer.preference.step import reported_metrics

    metrics: dict[str, Any] = {f"train/rewards/{x}": 1.0 for x in ("chosen", "rejected", "margin")}
    assert reported_metrics({**metrics, "train/desirable": 0.5}, "train").keys() == {
        *metrics,
        "train/desirable",
    }
    assert reported_metrics({**metrics, "train/desirable": 1 + 1e-7}, "train").keys() == {
        "train/rewards/chosen",
        "train/desirable",
    }
