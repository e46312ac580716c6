"""Settings of small jobs for every recipe, which name files in folders of the test."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.integration.runs import overrides, overrides_on_rows, write_jsonl
from trainer.async_training.recipe import ASYNC
from trainer.best_of_n.recipe import BEST_OF_N
from trainer.config.recipe import Recipe
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT

CODE = "tests.trainer.rehearsal.broken"
FILE = Path(__file__).parent / "broken.py"
RECIPES: dict[str, Recipe[Any]] = {
    "ppo": PPO,
    "async": ASYNC,
    "sft": SFT,
    "dpo": DPO,
    "reward-model": REWARD_MODEL,
    "best-of-n": BEST_OF_N,
}
ROW = {"prompt": "say a", "response": "ab", "chosen": "ab", "rejected": "cd"}


def settings_of(name: str, tiny: Path, folder: Path, *more: str) -> list[str]:
    """Return the settings of a job of that recipe; `{...}` in `more` are folders of the test."""
    places = {"tiny": tiny, "tmp": folder, "code": CODE, "file": FILE}
    for place in places:
        more = tuple(word.replace(f"<{place}>", str(places[place])) for word in more)
    if name == "best-of-n":
        data = (f"data.train_files={tiny}/few.parquet", "data.max_prompt_length=16")
        sizes = ("data.max_response_length=8", "data.train_batch_size=8")
        model = f"actor_rollout_ref.model.path={tiny}/model"
        run = ("trainer.backend=local", f"trainer.default_local_dir={folder}/run")
        return [model, *data, *sizes, *run, "actor_rollout_ref.rollout.n=2", *more]
    if name in ("ppo", "async"):
        has_kl = [] if name == "ppo" else ["algorithm.use_kl_in_reward=false"]
        words = overrides(tiny, folder / "run", "trainer.backend=local", *has_kl, *more)
        return [word for word in words if not word.startswith(NOT_ALWAYS) or word in more]
    rows = write_jsonl(folder / "rows.jsonl", [ROW] * 24)
    words = overrides_on_rows(tiny, {"train": rows, "val": rows}, folder / "run", *more)
    return [*words, "data.train_batch_size=8"]


NOT_ALWAYS = "algorithm.use_kl_in_reward=true"


def with_config(tiny: Path, out: Path, **fields: Any) -> Path:
    """Copy the tiny model with other fields of its config.json, and without weights."""
    shutil.copytree(tiny / "model", out, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    return out
