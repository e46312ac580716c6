"""Supervised fine-tuning of the tiny model: learning, checkpoints, resumes and errors."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.integration.runs import numbers, overrides_on_rows, write_jsonl
from trainer import run
from trainer.config.compose import checked_config, load_config
from trainer.data.lm_rows import encode_lm_row
from trainer.data.prompts import load_tokenizer
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError

ROWS = [{"prompt": f"say {letter}", "response": letter * 3} for letter in "abcdefghij"]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": "say b"},
            {"role": "assistant", "content": "bbb"},
            {"role": "user", "content": "say c"},
            {"role": "assistant", "content": "ccc"},
        ]
    }
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    return {
        "train": write_jsonl(folder / "train.jsonl", ROWS),
        "val": write_jsonl(folder / "val.jsonl", CHATS),
    }


SAVING = ("trainer.save_freq=3", "checkpoint.save_contents=[model,optimizer,extra,hf_model]")


def settings_of(tiny_dir: Path, files: dict[str, Path], folder: Path, *more: str) -> list[str]:
    short = ("data.train_batch_size=4", "trainer.total_epochs=2", "trainer.test_freq=5")
    return overrides_on_rows(tiny_dir, files, folder, *short, *more)


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two epochs of ten rows, four per step."""
    folder = tmp_path_factory.mktemp("whole")
    result = run(load_config(settings_of(tiny_dir, files, folder, *SAVING), SFT))
    assert result.model_folder == folder / "model"
    return folder


def loss_by_hand(model_folder: Path, rows: list[dict[str, object]], tokenizer_of: Path) -> float:
    """Return the mean of -log_prob over the loss tokens, row by row, by transformers."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(str(tokenizer_of))
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    losses: list[float] = []
    for row in rows:
        encoded = encode_lm_row(row, tokenizer)
        ids = torch.from_numpy(encoded.ids)
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        surprise = -log_probs.gather(-1, ids[1:, None])[:, 0]
        losses += surprise[torch.from_numpy(encoded.in_loss[1:])].tolist()
    return math.fsum(losses) / len(losses)


def test_the_loss_falls_and_every_row_is_trained(whole: Path) -> None:
    steps = [line for line in numbers(whole) if "train/loss" in line]
    assert len(steps) == 5
    assert [line["train/num_tokens"] for line in steps] == [16.0] * 5
    assert steps[-1]["train/loss"] < steps[0]["train/loss"] - 0.1
    assert [line["training/epoch"] for line in steps] == [0, 0, 1, 1, 1]


def test_the_validation_loss_equals_the_exported_models_loss(whole: Path, tiny_dir: Path) -> None:
    losses = [line["val/loss"] for line in numbers(whole) if "val/loss" in line]
    before = loss_by_hand(tiny_dir / "model", CHATS, tiny_dir / "model")
    for exported in ("global_step_5/sft/huggingface", "model"):
        after = loss_by_hand(whole / exported, CHATS, tiny_dir / "model")
        assert losses == pytest.approx([before, after], abs=1e-5)


def resumed(whole: Path, settings: list[str]) -> list[dict[str, float]]:
    """Run these settings from step 3 of `whole`, and return the numbers."""
    start = f"trainer.resume_from_path={whole}/global_step_3"
    config = load_config([*settings, "trainer.resume_mode=resume_path", start], SFT)
    run(config)
    return numbers(Path(config.trainer.default_local_dir))


def test_a_resumed_run_repeats_the_numbers(
    whole: Path, tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    expected = [line for line in numbers(whole) if line["step"] > 3]
    assert resumed(whole, settings_of(tiny_dir, files, tmp_path)) == expected


def test_rows_too_long_for_a_pass_are_rejected(
    tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_of(tiny_dir, files, tmp_path, "data.max_token_len_per_gpu=31")
    with pytest.raises(ConfigError, match=r"max_length=32: .*max_token_len_per_gpu=31"):
        load_config(settings, SFT)
    settings.remove("data.max_length=32")
    with pytest.raises(ConfigError, match=r"max_length=null: .* up to 1024 tokens .*_gpu=31"):
        load_config(settings, SFT)


def test_adapters_are_exported_and_resumed(
    tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    lora = ("model.lora_rank=4", "optim.lr=1e-2")
    whole = tmp_path / "whole"
    run(load_config(settings_of(tiny_dir, files, whole, *SAVING, *lora), SFT))
    lines = numbers(whole)
    before, after = [line["val/loss"] for line in lines if "val/loss" in line]
    exported = whole / "global_step_5" / "sft" / "huggingface"
    assert loss_by_hand(exported, CHATS, tiny_dir / "model") == pytest.approx(after, abs=1e-4)
    assert after < before - 0.05

    settings = settings_of(tiny_dir, files, tmp_path / "again", *lora)
    assert resumed(whole, settings) == [line for line in lines if line["step"] > 3]


def test_all_tokens_can_be_in_the_loss(
    tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    more = ("data.train_batch_size=4", "data.loss_on=all", "trainer.total_training_steps=1")
    train = {"train": files["train"]}
    run(load_config(overrides_on_rows(tiny_dir, train, tmp_path, *more), SFT))
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    row = encode_lm_row(ROWS[0], tokenizer)  # all rows have as many tokens
    assert numbers(tmp_path)[0]["train/num_tokens"] == 4 * (len(row.ids) - 1)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("data.max_length=513", r"max_length=513: .* has 512 positions\. .*to 512 or less"),
        ("model.path=nowhere", r"model\.path=nowhere is not a Hugging Face model folder"),
        ("data.train_files={bad}", r"bad\.jsonl, line 1: 'response' is empty"),
        ("data.train_files={chat}", r"chat\.jsonl, line 1: 'messages' has no message"),
        ("data.train_files={other}", r"line 1: it has neither 'messages', .* columns: words\."),
    ],
)
def test_a_dry_run_finds_errors_in_model_and_rows(
    key: str, problem: str, tiny_dir: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    rows = {
        "bad": {"prompt": "say a", "response": ""},
        "chat": {"messages": [{"role": "user", "content": "say a"}]},
        "other": {"words": "abc"},
    }
    paths = {name: write_jsonl(tmp_path / f"{name}.jsonl", [row]) for name, row in rows.items()}
    settings = settings_of(tiny_dir, files, tmp_path / "run", "trainer.dry_run=true")
    with pytest.raises(ConfigError, match=problem):
        run(load_config([*settings, key.format(**paths)], SFT))


def test_random_weights_need_a_seed_and_a_folder_without_weights(
    tiny_dir: Path, files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_config(settings_of(tiny_dir, files, tmp_path, "model.random_init_seed=1"), SFT)
    assert "random_init_seed has no effect: the folder of model.path has weights" in caplog.text

    without_weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(tiny_dir / "model", tmp_path / "model", ignore=without_weights)
    settings = settings_of(tmp_path, files, tmp_path / "run", *SAVING, "trainer.total_epochs=1")
    with pytest.raises(ConfigError, match=r"model.path=.* no weights.*model.random_init_seed="):
        run(load_config(settings, SFT))
    run(load_config([*settings, "model.random_init_seed=1"], SFT))
    exported = tmp_path / "run" / "global_step_3" / "sft" / "huggingface"
    assert (exported / "model.safetensors").is_file()


@pytest.mark.parametrize("preset", ["colocate", "split", "standalone"])
def test_a_placement_of_the_only_role_gets_a_note(preset: str) -> None:
    settings = ["data.train_files=x", "model.path=y"]
    _, notices = checked_config([*settings, f"placement={preset}"], SFT)
    assert notices == ["note: placement has no effect: this run has only one role"]
    assert not checked_config(settings, SFT)[1]
