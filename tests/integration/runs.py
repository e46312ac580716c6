"""Overrides of tiny runs, and functions that read their run folders."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

NO_CRITIC = re.compile(r"algorithm(\.adv_estimator)?=(?!gae$|ppo$|\{)")

EXPERTS = {
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "intermediate_size": 32},
}


def overrides(tiny: Path, folder: Path, *more: str) -> list[str]:
    """Return the overrides of a run of three steps on few prompts."""
    has_critic = not any(NO_CRITIC.match(setting) for setting in more)
    return [
        f"actor_rollout_ref.model.path={tiny}/model",
        f"data.train_files={tiny}/few.parquet",
        f"trainer.default_local_dir={folder}",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=2",
        *(["critic.optim.lr=1e-3"] if has_critic else []),
        "algorithm.use_kl_in_reward=true",
        "trainer.total_training_steps=3",
        "trainer.logger=[]",
        *more,
    ]


POLICY_ALONE = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false")
"""Neither critic nor reference: half a run's seconds, where a test asks nothing of them."""
FEW_ROWS = ("data.train_batch_size=4", "data.max_response_length=4")
"""One update a step, of short rows."""


def overrides_on_rows(tiny: Path, files: Mapping[str, Path], folder: Path, *more: str) -> list[str]:
    """Return the overrides of a run on the rows of `files`: "train" and, optionally, "val"."""
    return [
        f"model.path={tiny}/model",
        *(f"data.{name}_files={path}" for name, path in files.items()),
        f"trainer.default_local_dir={folder}",
        "data.max_length=32",
        "optim.lr=1e-3",
        "trainer.backend=local",
        "trainer.logger=[]",
        *more,
    ]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write one row per line, and return the path."""
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def with_experts(tiny: Path, folder: Path, family: str = "Qwen3Moe", **sizes: float) -> str:
    """Create a small mixture of experts next to the tiny tokenizer; return its key and path."""
    import torch
    import transformers

    shutil.copytree(tiny / "model", folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    known = transformers.AutoConfig.from_pretrained(folder).to_dict()
    names = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "hidden_size")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    own = {"num_hidden_layers": 2, **EXPERTS, **heads, **sizes}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**own, **{n: known[n] for n in names})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"


def two_steps(tiny: Path, folder: Path, *more: str) -> list[dict[str, float]]:
    """Run two PPO steps on processes of this machine, and return their numbers."""
    from trainer import load_config, run

    settings = ("trainer.backend=local", "placement=colocate", "trainer.total_training_steps=2")
    run(load_config(overrides(tiny, folder, *settings, *more)))
    return numbers(folder)


def assert_same_numbers(
    steps: Iterable[dict[str, float]], of_one: Iterable[dict[str, float]], *required: str
) -> None:
    """Compare the metrics of every step but those of the distribution of rows."""
    for metrics, expected in zip(steps, of_one, strict=True):
        shared = {name for name in expected.keys() & metrics.keys() if "seqlen" not in name}
        assert shared.issuperset(required)
        for name in shared:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def lines(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the lines of the steps' metrics, or of another file of the run folder."""
    text = (folder / file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def numbers(folder: Path) -> list[dict[str, float]]:
    """Return the metrics without those that depend on the clock or the transport."""
    return [
        {k: v for k, v in line.items() if not k.startswith(("timing", "perf/"))}
        for line in lines(folder)
    ]


def calls(folder: Path, method: str = "") -> list[dict[str, Any]]:
    """Return the events of a method, or of all methods; `args` has the lanes of the timeline."""
    lanes: dict[tuple[int, int], dict[str, Any]] = {}
    found = []
    for event in json.loads((folder / "timeline.json").read_text())["traceEvents"]:
        if event["name"] == "thread_name":
            lanes[event["pid"], event["tid"]] = event["args"]
        elif event["ph"] == "X" and method in ("", event["name"]):
            lane = lanes[event["pid"], event["tid"]]
            found.append(event | {"cat": lane["role"], "args": {**lane, **event["args"]}})
    return found
