"""PTX in a run: texts that every actor update trains together with its policy loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import numbers, overrides
from trainer import load_config, run
from trainer.ppo.memory import largest_pass
from trainer.ppo.updating import longest_row, make_ptx_loader, rows_per_update
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError

SETTINGS = (
    "trainer.backend=local",
    "trainer.n_gpus_per_node=1",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "trainer.save_freq=2",
    "ptx.coef=3",
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("ptx") / "texts.jsonl"
    rows = [{"text": f"{letter} is a letter"} for letter in "abcdefg"]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def settings_of(tiny_dir: Path, folder: Path, texts: Path, *more: str) -> list[str]:
    common = [key for key in overrides(tiny_dir, folder) if not key.startswith("critic.")]
    return [*common, *SETTINGS, f"ptx.train_files={texts}", *more]


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of three steps."""
    folder = tmp_path_factory.mktemp("whole")
    run(load_config(settings_of(tiny_dir, folder, texts)))
    return folder


def test_the_ptx_loss_is_logged_and_falls(whole: Path) -> None:
    losses = [line["actor/ptx_loss"] for line in numbers(whole)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.02


def test_a_resumed_run_repeats_the_numbers(
    whole: Path, tiny_dir: Path, texts: Path, tmp_path: Path
) -> None:
    start = f"trainer.resume_from_path={whole}/global_step_2"
    path = ("trainer.resume_mode=resume_path", start)
    run(load_config(settings_of(tiny_dir, tmp_path, texts, *path)))
    assert numbers(tmp_path) == numbers(whole)[2:]


def test_a_bad_row_stops_the_run_or_is_skipped(
    tiny_dir: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a is a letter"}\n{"text": ""}\n', encoding="utf-8")
    config = load_config(settings_of(tiny_dir, tmp_path, file))
    with pytest.raises(ConfigError, match=r"texts\.jsonl, line 2: .*data\.on_bad_row=skip"):
        make_ptx_loader(config, tokenizer)
    config = replace_keys(config, {"data.on_bad_row": "skip"})
    with caplog.at_level("INFO"):
        assert make_ptx_loader(config, tokenizer) is not None
    assert "ptx.train_files: 2 rows, 1 malformed and skipped" in caplog.text


def test_an_update_has_as_many_texts_as_prompts_by_default(
    tiny_dir: Path, texts: Path, tmp_path: Path
) -> None:
    config = load_config(settings_of(tiny_dir, tmp_path, texts))
    assert rows_per_update(config, 8) == 2 * 4  # two steps of four prompts
    assert rows_per_update(config, 4) == 4  # a last step of fewer prompts
    more = ("actor_rollout_ref.actor.ppo_epochs=3", "ptx.batch_size=5")
    config = load_config(settings_of(tiny_dir, tmp_path, texts, *more))
    assert rows_per_update(config, 8) == 2 * 3 * 5


def test_the_memory_plan_counts_the_texts(tiny_dir: Path, texts: Path, tmp_path: Path) -> None:
    by_rows = "actor_rollout_ref.actor.use_dynamic_bsz=false"
    config = load_config(settings_of(tiny_dir, tmp_path, texts, by_rows))
    assert longest_row(config) == 16 + 8
    samples = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    largest = largest_pass(config, "actor")
    assert (largest.tokens, largest.reads) == (samples * 24, samples * 24)
    config = replace_keys(config, {"ptx.max_length": 100})
    largest = largest_pass(config, "actor")
    assert (largest.tokens, largest.reads) == (samples * 100, samples * 100)


def test_texts_too_long_for_a_pass_are_rejected(
    tiny_dir: Path, texts: Path, tmp_path: Path
) -> None:
    more = (
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
        "ptx.max_length=65",
    )
    with pytest.raises(ConfigError, match=r"ptx.max_length=65: .*ppo_max_token_len_per_gpu=64"):
        load_config(settings_of(tiny_dir, tmp_path, texts, *more))
