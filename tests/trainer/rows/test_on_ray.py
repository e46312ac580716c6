"""Recipes on rows over two processes of a Ray cluster, against one process without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import numbers
from trainer import run
from trainer.config.compose import load_config
from trainer.config.recipe import Recipe
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]
TEXTS = [{"prompt": f"say {letter}", "response": letter * 3} for letter in "abcdefg"]
PAIRS = [
    {"prompt": "say a", "chosen": "a" * number, "rejected": "b" * number} for number in range(1, 8)
]


@pytest.mark.parametrize(
    ("recipe", "rows", "metric"),
    [(SFT, TEXTS, "val/loss"), (REWARD_MODEL, PAIRS, "val-core/rm/loss")],
    ids=["sft", "reward-model"],
)
def test_two_ranks_on_ray_write_the_numbers_of_one_process(
    recipe: Recipe[Any], rows: list[dict[str, str]], metric: str, tiny_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = {}
    for backend, num_processes in (("local", 1), ("ray", 2)):
        settings = [
            f"model.path={tiny_dir}/model",
            f"data.train_files={file}",
            f"data.val_files={file}",
            f"trainer.default_local_dir={tmp_path}/{backend}",
            f"trainer.backend={backend}",
            f"trainer.n_gpus_per_node={num_processes}",
            "data.train_batch_size=3",
            "data.max_length=32",
            "optim.lr=1e-3",
            "trainer.test_freq=3",
            "trainer.logger=[]",
        ]
        run(load_config(settings, recipe))
        found[backend] = numbers(tmp_path / backend)

    local, on_ray = found["local"], found["ray"]
    assert [line["train/num_tokens"] for line in on_ray[1:]] == [
        line["train/num_tokens"] for line in local[1:]
    ]
    for own, expected in zip(on_ray, local, strict=True):
        names = {"train/loss", metric} & expected.keys()
        assert names
        assert [own[name] for name in sorted(names)] == pytest.approx(
            [expected[name] for name in sorted(names)], rel=1e-4
        )
