"""The best samples of each prompt become rows for SFT and DPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.best_of_n.best_of_n import BestOfN
from tests.integration.runs import lines
from trainer.config.compose import load_config
from trainer.data.lm_rows import read_lm_rows
from trainer.data.pairs import read_pairs
from trainer.launch import run
from trainer.tools.evaluation.recipe import EVAL


def config_of(tiny_dir: Path, folder: Path, *more: str) -> Any:
    settings = [
        f"data.val_files={tiny_dir}/val.parquet",
        f"actor_rollout_ref.model.path={tiny_dir}/model",
        f"trainer.default_local_dir={folder}",
        *("data.train_batch_size=12", "data.max_prompt_length=16", "data.max_response_length=8"),
        "actor_rollout_ref.rollout.val_kwargs={n: 4, do_sample: true, temperature: 1.0}",
        *("trainer.logger=[]", *more),
    ]
    return load_config(settings, EVAL)


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of 32 prompts in batches of 12: the last has 8."""
    folder = tmp_path_factory.mktemp("whole")
    run(config_of(tiny_dir, folder), BestOfN)
    return folder


def test_sft_and_dpo_read_the_files(whole: Path, tokenizer: Any) -> None:
    rows, pairs = lines(whole, "best.jsonl"), lines(whole, "pairs.jsonl")
    assert [row["uid"] for row in rows] == [f"{number}-0" for number in range(32)]
    (metrics,) = lines(whole)
    assert metrics["score/best"] == pytest.approx(sum(row["score"] for row in rows) / 32)
    assert metrics["score/best"] > metrics["score/mean"]
    for row, read in zip(
        rows, read_lm_rows("f", f"{whole}/best.jsonl", tokenizer, max_length=64), strict=True
    ):
        end = tokenizer.eos_token if row["finish_reason"] == "stop" else ""
        assert tokenizer.decode(read.ids[read.in_loss]) == row["response"] + end
    assert len(read_pairs("f", f"{whole}/pairs.jsonl", tokenizer, max_length=64)) == len(pairs)
    assert all(pair["chosen_score"] > pair["rejected_score"] for pair in pairs)


def test_a_killed_run_continues_with_the_other_prompts(
    whole: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    class Killed(BestOfN):
        def write(self, samples: Any) -> None:
            super().write(samples)
            if len(lines(self.run.folder, "best.jsonl")) == 20:
                raise KeyboardInterrupt

    config = config_of(tiny_dir, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(config, Killed)
    run(config, BestOfN)
    for name in ("best.jsonl", "pairs.jsonl"):
        assert (tmp_path / name).read_text() == (whole / name).read_text()
