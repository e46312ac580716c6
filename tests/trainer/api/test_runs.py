"""Runs from Python: the command line's numbers, continued steps, ordered callbacks."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.integration.runs import numbers
from trainer import (
    DPO,
    GRPO,
    KTO,
    PPO,
    SFT,
    RewardModelTraining,
    RunResult,
    config_hash,
    load_config,
    main_ppo,
)
from trainer.config.compose import load_config as load_recipe_config
from trainer.config.settings import flat_settings, overrides_of
from trainer.hooks import Hooks
from trainer.ppo.recipe import PPO as PPO_RECIPE
from trainer.sft.recipe import SFT as SFT_RECIPE
from trainer.threads import with_threads
from verl_like.errors import CallbackError, ConfigError

PROMPTS = [{"prompt": f"say {letter}", "letter": letter} for letter in "abcdefgh"]
SMALL: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 4, "max_prompt_length": 16, "max_response_length": 8},
    "actor_rollout_ref": {"rollout": {"n": 2}, "actor": {"optim": {"lr": 1e-3}}},
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "trainer.logger": [],
}
ROWS = [{"prompt": f"say {letter}", "response": letter * 3} for letter in "abcdefghij"]
SMALL_SFT: dict[str, Any] = {
    "data": {"train_batch_size": 4, "max_length": 32},
    "trainer": {"logger": [], "val_before_train": False},
}


class HookRecorder:
    """A callback that records every hook with its step."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda trainer, *arguments: self.calls.append(f"{name} {trainer.global_step}")


class Failing:
    """A callback whose hook raises in the second step."""

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if trainer.global_step == 2:
            metrics["no such metric"]  # noqa: B018


def make_ppo(tiny_dir: Path, folder: Path, **more: Any) -> PPO:
    table = {letter: 1.0 for letter in "abcdefgh"}

    def score(response: str, letter: str) -> float:
        return table[letter] * response.count(letter) + sum(map(ord, response[:1])) / 100

    keys = {**SMALL, **more}
    return PPO(tiny_dir / "model", PROMPTS, score, save_to=folder, **keys)


@pytest.fixture(scope="module")
def finished(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[PPO, RunResult]:
    """A run of two steps, and its result."""
    ppo = make_ppo(tiny_dir, tmp_path_factory.mktemp("run"))
    return ppo, ppo.fit(steps=2)


def test_a_run_returns_its_metrics_and_folders(finished: tuple[PPO, RunResult]) -> None:
    ppo, result = finished
    assert [line["step"] for line in result.metrics] == [1, 2]
    assert {"critic/score/mean", "reward/score_score/mean"} <= result.metrics[0].keys()
    assert result.folder == ppo.folder
    assert result.model_folder == ppo.folder / "model"
    assert (result.model_folder / "config.json").is_file()


def test_a_run_prints_its_class_model_and_folder(tiny_dir: Path, tmp_path: Path) -> None:
    ppo, model = make_ppo(tiny_dir, tmp_path / "ppo"), tiny_dir / "model"
    assert repr(ppo) == f"PPO(model='{model}', folder='{tmp_path / 'ppo'}')"
    sft = SFT(model, ROWS, save_to=tmp_path / "sft", **SMALL_SFT)
    assert repr(sft) == f"SFT(model='{model}', folder='{tmp_path / 'sft'}')"


def test_the_command_line_has_the_same_configuration(
    finished: tuple[PPO, RunResult], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ppo, result = finished
    configs: list[Any] = []
    monkeypatch.setattr("trainer.launch.run", configs.append)
    monkeypatch.chdir(tmp_path)
    _, command, *arguments = shlex.split(ppo.command(steps=2).replace("steps=4", "steps=2"))
    monkeypatch.setattr(sys, "argv", ["verl-like", *arguments])
    main_ppo.main()
    assert command == "ppo"
    assert "trainer.save_freq=0" in arguments
    assert config_hash(with_threads(configs[0])) == result.config_hash

    saved = ppo.folder / "config.yaml"
    assert saved.read_text().startswith(f"# config hash {result.config_hash}\n")
    values = OmegaConf.to_container(OmegaConf.load(saved))
    keys = overrides_of(flat_settings(PPO_RECIPE.schema, values))
    reloaded = load_recipe_config([], PPO_RECIPE, defaults=keys)
    assert config_hash(reloaded) == result.config_hash


def test_unset_keys_cause_no_errors(tiny_dir: Path, tmp_path: Path) -> None:
    ppo = make_ppo(tiny_dir, tmp_path, **{"trainer.save_freq": -1, "data.total_prompts": 8})
    assert "save_contents" not in ppo.command()
    config = load_recipe_config(ppo.overrides(steps=2), PPO_RECIPE)
    assert (config.trainer.save_freq, config.trainer.backend) == (-1, "local")
    assert (config.trainer.total_training_steps, config.data.total_prompts) == (2, None)

    rows = SFT(tiny_dir / "model", ROWS, save_to=tmp_path / "sft", **{"trainer.save_freq": -1})
    rows_keys = {"trainer.save_freq=-1", "trainer.total_training_steps=2"}
    assert rows_keys <= set(rows.overrides(steps=2))


def test_two_calls_of_fit_are_one_run(
    finished: tuple[PPO, RunResult], tiny_dir: Path, tmp_path: Path
) -> None:
    ppo = make_ppo(tiny_dir, tmp_path)
    assert len(ppo.fit(steps=1).metrics) == 1
    assert len(ppo.fit(steps=1).metrics) == 2
    assert numbers(tmp_path) == numbers(finished[0].folder)


def test_episodes_are_counted_and_a_partial_update_is_trained(
    tiny_dir: Path, tmp_path: Path
) -> None:
    ppo = make_ppo(tiny_dir, tmp_path, **{"actor_rollout_ref.actor.ppo_mini_batch_size": 2})
    result = ppo.fit(num_episodes=5, max_timesteps=1, update_timesteps=4)
    files = [tmp_path / "rollouts" / f"{step + 1}.jsonl" for step in range(len(result.metrics))]
    rows = [len(file.read_text().splitlines()) for file in files]
    assert rows == [8, 2]
    assert all(line["actor/grad_norm"] > 0 for line in result.metrics)

    resumed = ppo.fit(num_episodes=1, max_timesteps=2, update_timesteps=2)
    assert len(resumed.metrics) == 2 + 1


def test_impossible_counts_are_rejected(tiny_dir: Path, tmp_path: Path) -> None:
    ppo = make_ppo(tiny_dir, tmp_path)
    with pytest.raises(ConfigError, match="steps=0: pass a number above 0"):
        ppo.fit(steps=0)
    with pytest.raises(ConfigError, match="max_timesteps=None: pass a number"):
        ppo.fit(num_episodes=1, update_timesteps=2)
    with pytest.raises(ConfigError, match="Pass only steps, or only num_episodes, max_timesteps"):
        ppo.fit(1, num_episodes=1)
    with pytest.raises(
        ConfigError, match="train_batch_size=4 is not a multiple of update_timesteps=3"
    ):
        ppo.fit(num_episodes=1, max_timesteps=3, update_timesteps=3)
    ppo = make_ppo(tiny_dir, tmp_path, **{"actor_rollout_ref.actor.ppo_mini_batch_size": 2})
    with pytest.raises(
        ConfigError, match="leaves 3 prompts for the last step .*size=2. Set data.total_prompts=6"
    ):
        ppo.fit(num_episodes=1, max_timesteps=7, update_timesteps=4)


def test_a_run_resumes_only_with_its_own_rows(
    finished: tuple[PPO, RunResult], tiny_dir: Path
) -> None:
    ppo, _ = finished
    before = (ppo.folder / "inputs" / "train_files.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"a run on different rows .*choose another folder"):
        PPO(tiny_dir / "model", ["say a"] * 8, save_to=ppo.folder, **SMALL)
    assert (ppo.folder / "inputs" / "train_files.jsonl").read_text() == before
    assert make_ppo(tiny_dir, ppo.folder)._steps_made() == 2


def test_hooks_of_ppo_are_called_in_the_documented_order(tiny_dir: Path, tmp_path: Path) -> None:
    recorder = HookRecorder()
    more = {"val_prompts": PROMPTS[:2], "trainer.test_freq": 1}
    ppo = PPO(
        tiny_dir / "model",
        PROMPTS,
        lambda response: len(response) / 8,
        save_to=tmp_path,
        callbacks=[recorder],
        **SMALL,
        **more,
    )
    ppo.fit(steps=1)
    assert recorder.calls == [
        "on_init_end 0",
        "on_train_begin 0",
        "on_validate_begin 0",
        "on_validate_end 0",
        "on_step_begin 1",
        "on_stage_begin 1",
        "on_sample_begin 1",
        "on_generated 1",
        "on_sample_end 1",
        "on_stage_end 1",
        *["on_stage_begin 1", "on_stage_end 1"] * 2,
        *["on_stage_begin 1", "on_filter 1", "on_update 1", "on_stage_end 1"],
        *["on_stage_begin 1", "on_stage_end 1"],
        "on_validate_begin 1",
        "on_validate_end 1",
        "on_step_end 1",
        "on_save_end 1",
        "on_train_end 1",
    ]
    hooks = {name for name in vars(Hooks) if name.startswith("on_")}
    assert {call.split()[0] for call in recorder.calls} == hooks


def test_sft_trains_the_last_rows_and_calls_its_hooks(tiny_dir: Path, tmp_path: Path) -> None:
    recorder = HookRecorder()
    ppo = SFT(tiny_dir / "model", ROWS, save_to=tmp_path, callbacks=[recorder], **SMALL_SFT)
    torch.set_num_threads(2)  # a run keeps the session's threads
    result = ppo.fit()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert [line["train/num_tokens"] for line in result.metrics] == [16.0, 16.0, 8.0]
    assert result.model_folder == tmp_path / "model"
    step = ["on_step_begin {}", "on_step_end {}"]
    assert recorder.calls == [
        *["on_init_end 0", "on_train_begin 0"],
        *[hook.format(number) for number in (1, 2, 3) for hook in step],
        *["on_save_end 3", "on_train_end 3"],
    ]
    _, command, *arguments = shlex.split(ppo.command())
    assert command == "sft"
    config = with_threads(load_config(arguments, SFT_RECIPE))
    assert config_hash(config) == result.config_hash


def test_an_error_of_a_callback_names_it_and_ends_the_run(tiny_dir: Path, tmp_path: Path) -> None:
    ppo = SFT(tiny_dir / "model", ROWS, save_to=tmp_path, callbacks=[Failing()], **SMALL_SFT)
    with pytest.raises(
        CallbackError, match=r"Failing\.on_step_end failed at step 2: KeyErr"
    ) as caught:
        ppo.fit()
    assert isinstance(caught.value.__cause__, KeyError)
    assert [line["step"] for line in numbers(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (type("Late", (), {"on_step_ended": None})(), "Late has 'on_step_ended'.*'on_step_end'"),
        (object(), "object has no hook"),
    ],
)
def test_a_callback_without_a_hook_is_rejected(
    callback: object, words: str, tiny_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        SFT(tiny_dir / "model", ROWS, save_to=tmp_path, callbacks=[callback])


def test_a_key_that_an_argument_sets_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path='b' is set as a key"):
        SFT("a", ROWS, save_to=tmp_path, **{"model.path": "b"})
    with pytest.raises(ConfigError, match=r"there is no key 'optim\.lrr'.*'optim\.lr'"):
        SFT("a", ROWS, save_to=tmp_path, optim={"lrr": 1.0})
    with pytest.raises(ConfigError, match="row 0: no column 'prompt'"):
        PPO("a", [{"question": "x"}], lambda answer: 1.0, save_to=tmp_path)
    with pytest.raises(ConfigError, match="reward.list is set twice"):
        PPO("a", PROMPTS, len, save_to=tmp_path, **{"reward.list": [len]})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: GRPO(), r"GRPO needs model and prompts, such as GRPO\(\"Qwen/.*, lambda response"),
        (lambda: PPO("a"), r"PPO needs prompts, such as PPO\("),
        (lambda: KTO(rows=[{}]), r"KTO needs model, such as KTO\(.*\"label\": True"),
    ],
)
def test_a_call_without_its_arguments_is_answered_with_an_example(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


PAIR = {"prompt": "say a", "chosen": "aa", "rejected": "b"}
LABELED = {"prompt": "say a", "completion": "aa", "label": True}


@pytest.mark.parametrize(
    ("cls", "good", "bad", "words"),
    [
        (GRPO, "say a", {"question": "a"}, "no column 'prompt'; non-empty columns: question"),
        (PPO, "say a", 3, "'prompt' is 3, neither a text nor messages"),
        (SFT, "abc", {"a": 1}, "it has neither 'messages', .*columns: a"),
        (SFT, "abc", PAIR, "; `verl-like dpo` trains on 'chosen' and 'rejected'"),
        (SFT, "abc", 3, "'messages' is 3, neither a text nor messages"),
        (SFT, "abc", {"messages": []}, "not a list of messages with role and content"),
        (SFT, "abc", {"prompt": "a", "response": 3}, "'response' is 3, not a text"),
        (RewardModelTraining, PAIR, {"chosen": "a"}, "it has no 'rejected'; columns: chosen"),
        (DPO, PAIR, {**PAIR, "rejected": "aa"}, "'chosen' and 'rejected' are equal: 'aa'"),
        (DPO, PAIR, {**PAIR, "chosen": 3}, "'chosen': the response must be a text"),
        (DPO, PAIR, LABELED, "it has no 'chosen' and no 'rejected'; .*, set loss=kto"),
        (KTO, LABELED, {**LABELED, "label": "good"}, "'label' is 'good', neither true nor false"),
        (KTO, PAIR, {"prompt": "a"}, "it has neither 'prompt', 'completion'"),
    ],
)
def test_rows_in_memory_are_checked_before_the_run(
    cls: Any, good: Any, bad: Any, words: str, tiny_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=rf"^(prompts|rows), row 1: .*{words}"):
        cls(tiny_dir / "model", [good, bad], save_to=folder)
    assert not folder.exists()
    with pytest.raises(ConfigError, match=r"^val_(prompts|rows), row 0: "):
        cls(tiny_dir / "model", [good], eval_dataset=[bad], save_to=folder)
    cls(tiny_dir / "model", [good, bad], save_to=folder, **{"data.on_bad_row": "skip"})


def test_runs_without_a_folder_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [SFT("a", ROWS, **SMALL_SFT).folder for _ in range(2)]
    assert folders == [tmp_path / "runs/verl_like" / name for name in ("sft-1", "sft-2")]


def test_rewards_are_a_function_a_list_or_the_section(tiny_dir: Path) -> None:
    judge = {"name": "judge", "kind": "model", "path": "j"}

    def short(response: str) -> float:
        return -float(len(response))

    def reward_of(reward: Any) -> Any:
        return PPO(tiny_dir / "model", ["say a"] * 4, reward).config().reward

    assert [item.name for item in reward_of(short).list] == ["short"]
    assert [item.name for item in reward_of([short, judge]).list] == ["short", "judge"]
    section = reward_of(
        {"list": [short], "max_failed_fraction": 0.1, "overlong_penalty": {"len": 2}}
    )
    assert [item.name for item in section.list] == ["short"]
    assert section.max_failed_fraction == 0.1
    model = reward_of({"model": {"enable": True, "path": "j"}, "function": {"weight": 0}})
    assert (model.model.path, model.function.weight, model.list) == ("j", 0, [])


def test_an_environment_makes_the_number_of_prompts_of_a_call(tiny_dir: Path) -> None:
    run = GRPO(tiny_dir / "model", 64, environment="guess.py:Guess")
    assert run.config().data.train_files == 64
    with pytest.raises(ConfigError, match=r"prompts has the type int: pass a list"):
        GRPO(tiny_dir / "model", 64)


def test_few_prompts_are_one_batch(tiny_dir: Path) -> None:
    ppo = PPO(tiny_dir / "model", ["say a"] * 6, reward=lambda response: 1.0)
    config = ppo.config()
    assert config.data.train_batch_size == 6
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 6
    assert "data.train_batch_size=6" in ppo.command()
    larger = PPO(tiny_dir / "model", ["say a"] * 100, data={"train_batch_size": 100}).config()
    assert larger.actor_rollout_ref.actor.ppo_mini_batch_size == 50


def test_a_rejected_run_leaves_no_folder(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no key 'nokey'"):
        PPO(tiny_dir / "model", ["say a"], save_to=tmp_path / "run", nokey=1)
    with pytest.raises(ConfigError, match="above 0"):
        PPO(tiny_dir / "model", ["say a"], save_to=tmp_path / "run", data={"train_batch_size": 0})
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError):
        PPO(tiny_dir / "model", ["say a"], save_to=tmp_path / "mine", data={"train_batch_size": 0})
    assert (tmp_path / "mine").is_dir()
