"""A bad configuration is an error with the key, the numbers and a fix; no process starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import load_config, run
from trainer.groups.worker_groups import WorkerGroups
from verl_like.errors import ConfigError, PlacementError


@pytest.fixture
def base(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A configuration that is good up to the first worker process."""

    def start(*_: Any) -> None:
        raise AssertionError("a worker process was started")

    monkeypatch.setattr(WorkerGroups, "_start", start)
    return [
        f"actor_rollout_ref.model.path={tiny_dir}/model",
        f"data.train_files={tiny_dir}/train.parquet",
        f"trainer.default_local_dir={tmp_path}/run",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.backend=local",
    ]


SETTINGS = [
    (
        "recipe=coati_legacy",
        r"there is no key 'recipe'\. The recipe is the command, here 'ppo'"
        r".*algorithm=coati_legacy",
    ),
    (
        "resource_pool_spec.rm=[1] role_mapping.reward_model=rm",
        "no role uses the pool 'rm'.*reward_model is mapped to it.*reward.model.enable=false",
    ),
    ("+role_mapping.critc=global_pool", "Did you mean 'critic'"),
    ("role_mapping.critic=globl_pool", "'globl_pool', which does not exist. Did.*'global_pool'"),
    (
        "actor_rollout_ref.model.lora_rank=4 actor_rollout_ref.model.target_modules=[q_projj]",
        r"model.target_modules=\['q_projj'\].*Did you mean 'q_proj'",
    ),
    (
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        "=3 prompts.*train_batch_size=8.*nearest that do: 2, 4",
    ),
    (
        "data.max_response_length=600",
        r"16 \+ data.max_response_length=600 = 616 tokens.*512 positions.*by 104",
    ),
    (
        "data.train_files=nowhere.parquet",
        "data.train_files: there is no file nowhere.parquet.*contains",
    ),
    ("max_new_tokens=8", "Did you mean 'data.max_response_length'"),
    ("data.prompt_key=promt", "no column 'promt'.*data_source, prompt.*Did you mean 'prompt'"),
    (
        "data.max_prompt_length=8",
        "row 0: the prompt has 9 tokens, but data.max_prompt_length=8"
        ".*filter_overlong_prompts=true",
    ),
    (
        "data.max_prompt_length=4 data.filter_overlong_prompts=true",
        "300 prompts of at most 10 tokens.*300 dropped.*train_batch_size=8 .*remaining 0. Add",
    ),
    (
        "algorithm.adv_estimator=rloo",
        "rollout.n=1 generates only one.*Set actor_rollout_ref.rollout.n to 2 or more",
    ),
    (
        "algorithm.adv_estimator=gdpo actor_rollout_ref.rollout.n=2",
        r"compares several rewards.*algorithm.gdpo_reward_keys, which is \[\].*seq_reward",
    ),
    (
        "algorithm.adv_estimator=gdpo actor_rollout_ref.rollout.n=2 "
        "algorithm.gdpo_reward_keys=[a,b] algorithm.gdpo_reward_weights=[1]",
        "=\\[1.*\\] must have one number per reward.*null for equal weights",
    ),
    (
        "algorithm.adv_estimator=grpo_process actor_rollout_ref.rollout.n=2 "
        "algorithm.use_kl_in_reward=true",
        "grpo_process does not read.*actor.use_kl_loss=true",
    ),
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode=luspo "
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "is gspo.*loss_agg_mode=seq-mean-token-sum",
    ),
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov "
        "actor_rollout_ref.actor.ppo_epochs=2 actor_rollout_ref.actor.shuffle=true",
        "actor.shuffle=true.*loss_mode=kl_cov.*in each epoch",
    ),
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov "
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb=6",
        "clip_cov_lb=6.*clip_cov_ub=5.*no covariance",
    ),
    ("reward.function.path=mine.py", "reward.function.path=mine.py.*no such file"),
    (
        "reward.function.path=json",
        "reward.function.name=.* has no 'compute_score'. It has.*dumps",
    ),
    (
        "trainer.cls=trainer.ppo.PPOTrainr",
        "trainer.cls=trainer.ppo.PPOTrainr.*Did you mean 'PPOTrainer'",
    ),
    ("reward.overlong_penalty.enable=true", "overlong_penalty.len=0 tokens.*max_response_length=8"),
    (
        "actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=3 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        r"parallel_size=2 does not divide the 3 .*pool 'global_pool'.*: 1, 3",
    ),
    ("reward.model.enable=true", "reward.model.path.*sequence classifier"),
    ("data.custom_cls.path=mine.py", "data.custom_cls.path=mine.py is set, but not the name"),
    (
        "critic.model.path=nowhere",
        "critic.model.path=nowhere.*there is no such folder.*verl-like make-tiny DIR",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "words"), SETTINGS, ids=[overrides for overrides, _ in SETTINGS]
)
def test_a_bad_setting_is_rejected(base: list[str], overrides: str, words: str) -> None:
    with pytest.raises((ConfigError, PlacementError), match=words):
        run(load_config([*base, *overrides.split()]))


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return f"data.train_files={path}"


def row_without_prompt(tiny: Path, folder: Path) -> str:
    rule = {"data_source": "verl_like/tiny_letters", "reward_model": {"ground_truth": "a"}}
    return write_rows(folder / "p.jsonl", {"prompt": "a", **rule}, rule)


def unknown_source(tiny: Path, folder: Path) -> str:
    row = {"prompt": "a", "data_source": "openai/gsm9k", "reward_model": {"ground_truth": "1"}}
    return write_rows(folder / "p.jsonl", *[row] * 8)


def asserts_as_tests(tiny: Path, folder: Path) -> str:
    tests = json.dumps({"asserts": ["assert f(1) == 1", "assert same(f(1), 1)"]})
    row = {"prompt": "a", "data_source": "taco", "reward_model": {"ground_truth": tests}}
    return write_rows(folder / "p.jsonl", *[row] * 8)


def model_without(*patterns: str) -> Callable[[Path, Path], str]:
    def make(tiny: Path, folder: Path) -> str:
        shutil.copytree(tiny / "model", folder / "model", ignore=shutil.ignore_patterns(*patterns))
        return f"actor_rollout_ref.model.path={folder}/model"

    return make


def file_as_run_folder(tiny: Path, folder: Path) -> str:
    (folder / "file").touch()
    return f"trainer.default_local_dir={folder}/file/run"


def another_run(tiny: Path, folder: Path) -> str:
    (folder / "other").mkdir()
    (folder / "other" / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    (folder / "other" / "config.yaml").write_text(
        "data:\n  train_batch_size: 64\n", encoding="utf-8"
    )
    return f"trainer.default_local_dir={folder}/other"


def reward_model_without_score(tiny: Path, folder: Path) -> str:
    return f"reward.list=[{{name: model, kind: model, path: {tiny}/model}}]"


def reward_model_without_weights(tiny: Path, folder: Path) -> str:
    shutil.copy(tiny / "model/config.json", folder)
    return f"reward.list=[{{name: model, kind: model, path: {folder}}}]"


def model_with_half_a_config(tiny: Path, folder: Path) -> str:
    shutil.copytree(tiny / "model", folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": ', encoding="utf-8")
    return f"actor_rollout_ref.model.path={folder}/model"


def folder_of_rows(tiny: Path, folder: Path) -> str:
    (folder / "rows.jsonl").touch()
    return f"data.train_files={folder}"


FILES = [
    (folder_of_rows, r"train_files: .* is a folder, which contains rows\.jsonl"),
    (reward_model_without_score, r"reward.list\[0\].path=.*has no score.weight"),
    (reward_model_without_weights, r"reward.list\[0\].path=.* has a config.json and no weights"),
    (model_with_half_a_config, "config.json is damaged: Expecting value"),
    (row_without_prompt, "p.jsonl, line 2.*no column 'prompt'.*data.on_bad_row=skip"),
    (
        unknown_source,
        "data_source 'openai/gsm9k'.*reward=FILE.py:FUNCTION.*openai/gsm8k.*Did you mean",
    ),
    (model_without("token*"), "cannot load a tokenizer.*model.safetensors. Copy tokenizer.json"),
    (
        model_without("chat_template*"),
        "row 0: it is a chat.*has no chat template.*chat_template.jinja",
    ),
    (model_without("config.json"), "not a Hugging Face model folder.*no config.json"),
    (file_as_run_folder, "trainer.default_local_dir=.*is not writable.*Choose another folder"),
    (
        another_run,
        "metrics of a run with another configuration.*train_batch_size was 64, is 8"
        ".*resume_mode=disable",
    ),
]


@pytest.mark.parametrize(("make", "words"), FILES)
def test_bad_files_are_rejected(
    base: list[str], tiny_dir: Path, tmp_path: Path, make: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(load_config([*base, make(tiny_dir, tmp_path)]))


@pytest.mark.parametrize(
    "function",
    [
        "",
        "reward.function.path=workers.rewards.code reward.function.name=run_tests",
        "reward.list=[{name:tests,path:workers.rewards.code,function:run_tests}]",
    ],
)
def test_asserts_are_rejected_for_every_form_of_their_rule(
    base: list[str], function: str, tiny_dir: Path, tmp_path: Path
) -> None:
    settings = [*base, *function.split(), asserts_as_tests(tiny_dir, tmp_path)]
    words = "ground_truth has an assert.*forge its score.*reward.trust_programs=true"
    with pytest.raises(ConfigError, match=words):
        run(load_config(settings))
    with pytest.raises(AssertionError, match="a worker process was started"):
        run(load_config([*settings, "reward.trust_programs=true"]))


@pytest.mark.ray
def test_missing_gpus_are_rejected(
    base: list[str], ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    without = [node | {"Resources": {"CPU": 2.0}} for node in ray.nodes()]
    monkeypatch.setattr(ray, "nodes", lambda: without)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        PlacementError,
        match="trainer.device=cuda asks for GPUs, but .*Set trainer.device=auto or cpu",
    ):
        run(load_config([*base, "trainer.backend=ray", "trainer.device=cuda"]))


def test_another_run_may_be_overwritten(base: list[str], tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a worker process was started"):
        run(load_config([*base, another_run(tiny_dir, tmp_path), "trainer.resume_mode=disable"]))


NEEDED = ["data.train_files=x", "actor_rollout_ref.model.path=y"]


def test_all_empty_required_keys_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([])
    starts = [line.partition(" is empty")[0] for line in str(caught.value).splitlines()]
    assert sorted(starts) == ["actor_rollout_ref.model.path", "data.train_files"]


def test_all_unknown_keys_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*NEEDED, "data.tran_files=x", "logger=console", "critic_pool=2"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(
        "there is no key 'data.tran_files'. Did you mean 'data.train_files'?"
    )
    assert lines[1] == "there is no key 'logger'. Did you mean 'trainer.logger'?"
    assert "Did you mean 'resource_pool_spec.critic_pool', the processes of that pool?" in lines[2]
    assert lines[3] == "All keys: verl-like ppo --cfg all"


def test_a_list_of_one_value_needs_no_brackets() -> None:
    settings = ["placement=split", "trainer.n_gpus_per_node=5", "trainer.logger=console"]
    pools = ["resource_pool_spec.critic_pool=2", "resource_pool_spec.actor_rollout_ref_pool=3"]
    config = load_config([*NEEDED, *settings, *pools])
    assert config.trainer.logger == ["console"]
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": [3], "critic_pool": [2]}
    assert load_config([*NEEDED, "trainer.logger=[]"]).trainer.logger == []
