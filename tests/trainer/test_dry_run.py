"""`trainer.dry_run=true` finds errors in files, models, code and devices.

No process of a worker starts, and nothing is written.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.runs import overrides
from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.config.schema import Recipe
from trainer.data import files
from trainer.data.prompts import load_tokenizer
from trainer.launch import NO_ERRORS
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.run_folder.tracking import BUILT_IN
from trainer.sft.recipe import SFT
from trainer.tools.evaluation.recipe import EVAL
from verl_like.errors import ConfigError, VerlLikeError

DRY = ("trainer.dry_run=true", "trainer.backend=local", "trainer.logger=[]")
ROW = {"prompt": "say a", "response": "ab", "chosen": "ab", "rejected": "cd"}
SMALL = ("data.max_prompt_length=16", "data.max_response_length=8", "data.train_batch_size=4")
ON_ROWS = {"sft": SFT, "reward-model": REWARD_MODEL, "dpo": DPO}
WRITING = {
    **dict.fromkeys(ON_ROWS, ("data.val_files={tmp}/rows.jsonl", "trainer.test_freq=1")),
}
"""Recipe -> settings of a run that would write more than its folder."""
RECIPES = {"ppo": PPO, "async": ASYNC, **ON_ROWS, "eval": EVAL}


@pytest.fixture(autouse=True)
def no_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.launch.WorkerGroups", None)


def settings_of(name: str, tiny: Path, folder: Path) -> list[str]:
    """Return the settings of a valid run of that recipe."""
    if name in ("ppo", "async"):
        return overrides(tiny, folder / "run", *DRY)
    home = f"trainer.default_local_dir={folder}/run"
    if name in ON_ROWS:
        (folder / "rows.jsonl").write_text(json.dumps(ROW), encoding="utf-8")
        data = (f"data.train_files={folder}/rows.jsonl", "data.max_length=32")
        return [f"model.path={tiny}/model", *data, home, *DRY]
    files = "val_files" if name == "eval" else "train_files"
    data = (f"data.{files}={tiny}/val.parquet", *SMALL)
    return [f"actor_rollout_ref.model.path={tiny}/model", *data, home, *DRY]


def dry(name: str, tiny: Path, folder: Path, *more: str) -> None:
    recipe: Recipe[Any] = RECIPES[name]
    run(load_config([*settings_of(name, tiny, folder), *more], recipe))


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_describes_a_valid_run_and_writes_nothing(
    name: str,
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = settings_of(name, tiny_dir, tmp_path)
    more = [setting.format(tmp=tmp_path) for setting in WRITING.get(name, ())]
    more += [f"trainer.logger=[{','.join(BUILT_IN)}]"]
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    run(load_config([*settings, *more], RECIPES[name]))
    assert sorted(tmp_path.rglob("*")) == before
    output = capsys.readouterr().out
    assert output.endswith(f"\n{NO_ERRORS}\n")
    assert " on this machine\n" in output
    assert ("rows to train on: 1" if name in ON_ROWS else "prompts") in output
    reward = r"Reward check \((rule for|reward function) .+\): 8 rows with their ground truth"
    assert (name in ON_ROWS) or re.search(reward, output)


PROBLEMS = [
    (
        "ppo",
        "reward.function.path={tmp}/my.py reward.function.name=asks",
        "reward.function.path=.*my.py: the reward function asks has an unknown parameter 'answer'",
    ),
    (
        "ppo",
        "reward.function.path={tmp}/my.py reward.function.name=fails",
        "my.py, tried on the first row's ground truth: KeyError",
    ),
    (
        "ppo",
        "reward.function.path={tmp}/my.py reward.function.name=splits "
        "algorithm.filter_groups.enable=true algorithm.filter_groups.metric=acc "
        "algorithm.adv_estimator=grpo ~critic.optim.lr",
        "algorithm.filter_groups.metric=acc: choose seq_reward, or .*; here: seq_reward, accuracy",
    ),
    ("ppo", "actor_rollout_ref.rollout.name=vllm", "needs the package vllm.* is not installed"),
    ("ppo", "trainer.nnodes=2", "nnodes=2 with trainer.backend=local, .* only on this machine"),
    ("ppo", "reward.model.enable=true reward.model.path={tmp}/judge", "reward.model.path=.*j"),
    (
        "ppo",
        "+role_workers.critic=my_roles.Critic",
        "role_workers.critic=my_roles.Critic cannot be impo",
    ),
    (
        "eval",
        "data.val_files={tmp}/no.parquet data.max_response_length=4000",
        "data.val_files: there is no file",
    ),
    ("eval", "reward.function.path={tmp}/no.py", "there is no such file"),
    (
        "dpo",
        "data.train_files={tmp}/no.jsonl data.max_length=2000",
        "data.train_files: there is no",
    ),
    (
        "ppo",
        "reward.function.path={tmp}/no.py data.max_response_length=4000",
        "reward.function.path=.*: there is no such file",
    ),
    ("dpo", "trainer.device=cuda", "trainer.device=cuda asks for GPUs, but torch .* sees none"),
]


@pytest.mark.parametrize(("name", "more", "words"), PROBLEMS, ids=[words for *_, words in PROBLEMS])
def test_a_dry_run_rejects_what_would_fail(
    name: str,
    more: str,
    words: str,
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("workers.rollout.vllm.setup.version", _is_not_installed)
    (tmp_path / "my.py").write_text(
        "def asks(answer): return 1.0\n"
        "def fails(solution_str): raise KeyError(solution_str)\n"
        "def splits(solution_str): return {'score': 1.0, 'accuracy': 1.0}\n"
    )
    with pytest.raises(VerlLikeError, match=words):
        dry(name, tiny_dir, tmp_path, *more.format(tmp=tmp_path).split())


def _is_not_installed(package: str) -> str:
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(package)


def test_a_dry_run_rejects_a_critic_with_another_tokenizer(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_dir / "model", tmp_path / "critic")
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    tokenizer.add_tokens(["~"])
    tokenizer.save_pretrained(tmp_path / "critic")
    with pytest.raises(ConfigError, match="the model of role 'critic', .* 1 tokens differ"):
        dry("ppo", tiny_dir, tmp_path, f"critic.model.path={tmp_path}/critic")


def test_a_dry_run_rejects_too_few_gpus(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(VerlLikeError, match="n_gpus_per_node=2, but this machine has 1"):
        dry("eval", tiny_dir, tmp_path, "trainer.n_gpus_per_node=2")


@pytest.mark.parametrize("name", ["ppo", "dpo"])
def test_a_dry_run_reads_the_first_rows_of_large_files(
    name: str,
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(files, "DRY_RUN_ROWS", 5)
    settings = settings_of(name, tiny_dir, tmp_path)
    if name in ON_ROWS:
        (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 8, encoding="utf-8")
        settings.append("data.train_batch_size=2")
    config = load_config(settings, RECIPES[name])
    limit = 5 + getattr(config.data, "train_batch_size", 0)
    with caplog.at_level("INFO"):
        run(config)
    assert f"the first {limit} rows were read; a run reads them all" in caplog.text
