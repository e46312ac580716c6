"""SFT on chats teaches the tiny model to end its turns, so that GRPO after it has whole samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import POLICY_ALONE, lines, overrides, overrides_on_rows, write_jsonl
from trainer import load_config, run
from trainer.sft.recipe import SFT
from trainer.sft.step import SFTTrainer


@pytest.mark.long
def test_grpo_after_sft_on_chats_has_responses_that_end(tiny_dir: Path, tmp_path: Path) -> None:
    chats = [
        [
            {"role": "user", "content": f"say {letter}"},
            {"role": "assistant", "content": letter * (2 + number % 3)},
        ]
        for number, letter in enumerate("abcd" * 16)
    ]
    rows = write_jsonl(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    sft = overrides_on_rows(
        tiny_dir, {"train": rows}, tmp_path / "sft", "trainer.total_epochs=30", "optim.lr=3e-3"
    )
    run(load_config(sft, SFT), SFTTrainer)
    settings = (
        *("trainer.backend=local", "trainer.total_training_steps=1", *POLICY_ALONE),
        f"actor_rollout_ref.model.path={tmp_path}/sft/model",
    )
    run(load_config(overrides(tiny_dir, tmp_path / "grpo", *settings)))
    (step,) = lines(tmp_path / "grpo")
    assert step["response_length/clip_ratio"] < 0.3
