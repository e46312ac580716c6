"""Recipes on rows in two processes on Ray, against one process without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import numbers, overrides_on_rows, write_jsonl
from trainer import run
from trainer.config.compose import load_config
from trainer.config.schema import Recipe
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]
TEXTS = [{"prompt": f"say {letter}", "response": letter * 3} for letter in "abcdefg"]
PAIRS = [
    {"prompt": "say a", "chosen": "a" * number, "rejected": "b" * number} for number in range(1, 8)
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "rows", "loss", "metric"),
    [
        (SFT, TEXTS, (), "val/loss"),
        (REWARD_MODEL, PAIRS, (), "val-core/rm/loss"),
        (DPO, PAIRS, ("loss=kto",), "val/loss"),
    ],
    ids=["sft", "reward-model", "dpo"],
)
def test_two_ranks_on_ray_write_the_numbers_of_one_process(
    recipe: Recipe[Any],
    rows: list[dict[str, str]],
    loss: tuple[str, ...],
    metric: str,
    tiny_dir: Path,
    tmp_path: Path,
) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    metrics = {}
    for backend, num_processes in (("local", 1), ("ray", 2)):
        more = (
            f"trainer.backend={backend}",
            f"trainer.n_gpus_per_node={num_processes}",
            "data.train_batch_size=3",
            "trainer.test_freq=3",
            *loss,
        )
        files = {"train": file, "val": file}
        settings = overrides_on_rows(tiny_dir, files, tmp_path / backend, *more)
        run(load_config(settings, recipe))
        metrics[backend] = numbers(tmp_path / backend)

    for line, expected in zip(metrics["ray"], metrics["local"], strict=True):
        assert line.get("train/num_tokens") == expected.get("train/num_tokens")
        losses = {name: expected[name] for name in {"train/loss", metric} & expected.keys()}
        assert losses
        assert {name: line[name] for name in losses} == pytest.approx(losses, rel=1e-4)
