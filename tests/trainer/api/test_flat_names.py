"""Flat names map to keys; an unknown name is rejected with the nearest name."""

from __future__ import annotations

import ast
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from trainer import DPO, GRPO, KTO, PPO, SFT, AsyncPPO, RewardModelTraining, load_config
from trainer.api.flat_names import (
    LIKE_TRL,
    PPO_NAMES,
    TRL_NAMES,
    TRL_PPO_OBJECTS,
    PPOKeys,
    RowKeys,
    settings_of,
    trl_names,
)
from trainer.api.python_run import bare_errors
from trainer.config.keys import flat_config, named_keys
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO as PPO_RECIPE
from verl_like.calls.messages import RemoteError
from verl_like.errors import ConfigError
from verl_like.registry import load_object
from workers.config.rows import LONGEST_ROW

ROWS = [{"prompt": "say a", "response": "aaa"}] * 4
PAIRS = [{"prompt": "say a", "chosen": "aaa", "rejected": "b"}] * 4


@pytest.mark.parametrize("cls", [PPO, GRPO, AsyncPPO, SFT, RewardModelTraining, DPO, KTO])
def test_every_flat_name_stands_for_a_key_and_is_no_key(cls: Any) -> None:
    recipe = load_object(cls._recipe_path, "")
    keys = named_keys(recipe.schema)
    assert set(cls._flat_names.values()) <= keys.keys()
    assert not cls._flat_names.keys() & {*keys, *recipe.groups}
    assert len({*cls._flat_names.values()}) == len(cls._flat_names)


def test_grpo_by_flat_names_is_ppo_by_keys(tiny_dir: Path, tmp_path: Path) -> None:
    names = {"lr": 1e-3, "n": 2, "batch_size": 4, "mini_batch_size": 2, "max_response_length": 8}
    model, prompts = tiny_dir / "model", ["say a"] * 8
    run = GRPO(
        model, prompts, lambda response: 1.0, kl_loss_coef=0.5, epochs=2, save_to=tmp_path, **names
    )
    config = run.config()
    assert config.algorithm.adv_estimator == "grpo"
    actor = config.actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.optim.lr) == (True, 0.5, 1e-3)
    assert (config.actor_rollout_ref.rollout.n, actor.ppo_mini_batch_size) == (2, 2)
    assert (config.data.train_batch_size, config.data.max_response_length) == (4, 8)
    assert (config.trainer.total_epochs, run.folder) == (2, tmp_path)
    assert {"algorithm=grpo", "actor_rollout_ref.rollout.n=2"} <= set(run.command().split())

    other = GRPO(
        model, prompts, lambda response: 1.0, algorithm="dr_grpo", kl_loss_coef=0, save_to=tmp_path
    )
    assert not other.config().actor_rollout_ref.actor.use_kl_loss
    section = {"adv_estimator": "rloo"}
    other = GRPO(model, prompts, lambda response: 1.0, algorithm=section, save_to=tmp_path)
    assert other.config().algorithm.adv_estimator == "rloo"
    assert other.config().actor_rollout_ref.rollout.n == 8, "the preset's"


@pytest.mark.parametrize(("cls", "rows"), [(SFT, ROWS), (DPO, PAIRS)])
def test_recipes_on_rows_accept_all_forms_of_keys(
    cls: Any, rows: Any, tiny_dir: Path, tmp_path: Path
) -> None:
    run = cls(
        tiny_dir / "model",
        rows,
        lr=1e-3,
        batch_size=2,
        max_length=64,
        model={"dtype": "float32"},
        save_to=tmp_path,
        **{"optim.weight_decay": 0.5},
    )
    config = run.config()
    assert (config.optim.lr, config.optim.weight_decay, config.model.dtype) == (
        1e-3,
        0.5,
        "float32",
    )
    assert (config.data.train_batch_size, config.data.max_length) == (2, 64)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"batchsize": 4}, r"no key 'batchsize'\. Did you mean 'batch_size'"),
        ({"max_respons_length": 8}, r"Did you mean 'max_response_length'\? Keywords: lr, .*, n, "),
        ({"steps": 5}, r"no key 'steps'\. Pass it to fit, as in fit\(steps=5\)"),
        (
            {"per_device_train_batch_size": 4},
            r"completions of one process.*per_device_train_batch_size \* "
            r"gradient_accumulation_steps \* processes / num_generations\.",
        ),
        ({"gradient_accumulation_steps": 4}, "TRL counts completions of one process"),
        ({"n_gpus": 2}, r"Did you mean 'devices'\?"),
        ({"max_new_tokens": 8}, r"Did you mean 'max_response_length'\?"),
        ({"report_to": "wandb"}, "TRL's report_to is 'logger' here"),
        ({"num_generations": 8, "n": 4}, "num_generations and n are two names of the same setting"),
        ({"zzz": 1}, r"no key 'zzz'\. Keywords: lr, "),
        ({"args": 1}, r"TRL's args=...Config\(...\) is not read: pass its fields"),
        (
            {"lr": 1, "actor_rollout_ref.actor.optim.lr": 2},
            r"lr=1 sets actor.*but .*lr=2 is also set",
        ),
        (
            {"kl_loss_coef": 0, "actor_rollout_ref.actor.use_kl_loss": True},
            "kl_loss_coef=0 sets .*kl_loss=False",
        ),
    ],
)
def test_unknown_and_repeated_names_are_rejected(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings_of(keywords, PPO._flat_names, PPO_RECIPE)


def test_an_invalid_value_is_told_by_the_argument(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_batch_size=-1.* Here batch_size sets data.train_"):
        SFT(tiny_dir / "model", ROWS, batch_size=-1, seed=2, save_to=tmp_path / "run")


def test_swapped_arguments_are_named_as_in_the_call(tiny_dir: Path, tmp_path: Path) -> None:
    model = str(tiny_dir / "model")
    for data in (["say a"], [{"prompt": "say a"}], "prompts.parquet"):
        with pytest.raises(ConfigError, match="is data: GRPO takes the model first, then prompts"):
            GRPO(data, model, save_to=tmp_path / "run")
    with pytest.raises(ConfigError, match="is data: SFT takes the model first, then rows, as in"):
        SFT(ROWS, model, save_to=tmp_path / "run")
    for cls, words in ((GRPO, "^prompts is empty"), (SFT, "^rows is empty")):
        with pytest.raises(ConfigError, match=words):
            cls(model, [], save_to=tmp_path / "run")


def test_an_error_of_a_call_shows_one_frame_of_ours(tiny_dir: Path, tmp_path: Path) -> None:
    run = SFT(tiny_dir / "model", ROWS, save_to=tmp_path / "run")
    for call in (lambda: SFT(tiny_dir / "nowhere", ROWS, lr=-1), lambda: run.fit(steps=-1)):
        with pytest.raises(ConfigError) as caught:
            call()
        files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert [Path(file).name for file in files if file != __file__] == ["python_run.py"]
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_a_notice_of_a_call_is_shown_once(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    run = GRPO(tiny_dir / "model", ["a"], lambda response: 1.0, critic_lr=1e-5, save_to=folder)
    run.config()
    run.command()
    shown = [record.getMessage() for record in caplog.records]
    assert shown
    assert len(shown) == len(set(shown))


def test_names_of_trl_clash_with_no_key() -> None:
    names = TRL_NAMES | LIKE_TRL
    keys = {*named_keys(PPO_RECIPE.schema)}
    assert {*names.values()} <= {*PPO_NAMES, *keys}
    assert not (names | TRL_PPO_OBJECTS).keys() & {*PPO_NAMES, *keys}


def test_the_arguments_of_a_trl_trainer_are_accepted(tiny_dir: Path, tmp_path: Path) -> None:
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    model, prompts = tiny_dir / "model", [{"prompt": "a"}, {"prompt": "b"}]
    theirs = GRPO(
        model=model,
        reward_funcs=reward,
        train_dataset=prompts,
        eval_dataset=prompts[:1],
        num_generations=2,
        max_steps=3,
        output_dir=tmp_path / "theirs",
    )
    ours = GRPO(model, prompts, reward, val_prompts=prompts[:1], n=2, save_to=tmp_path / "ours")
    expected = {**ours.settings, "trainer.total_training_steps": 3}
    assert str(sorted(theirs.settings.items())) == str(sorted(expected.items())).replace(
        "/ours", "/theirs"
    )
    sft = SFT(model=model, train_dataset=ROWS, eval_dataset=ROWS[:2], output_dir=tmp_path / "sft")
    assert sft.config().data.val_files
    with pytest.raises(ConfigError, match="train_dataset and prompts are two names of the same"):
        GRPO(model, prompts, reward, train_dataset=prompts)
    with pytest.raises(ConfigError, match=r"GRPO needs prompts, such as GRPO\("):
        GRPO(model, reward=reward)
    with pytest.raises(ConfigError, match="train_dataset and rows are two names of the same"):
        SFT(model, ROWS, train_dataset=ROWS)
    with pytest.raises(ConfigError, match="no key 'reward_funcs'"):
        SFT(model, ROWS, reward_funcs=reward)


def test_kto_is_dpo_with_its_loss(tiny_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "say a", "completion": "aaa", "label": True}] * 4
    config = KTO(f"{tiny_dir}/model", rows, save_to=tmp_path / "kto").config()
    assert (config.loss, KTO._recipe_path) == ("kto", DPO._recipe_path)


@pytest.mark.parametrize(
    ("keys", "classes"),
    [(PPOKeys, [PPO, AsyncPPO]), (RowKeys, [SFT, RewardModelTraining, DPO, KTO])],
)
def test_typed_keys_are_complete(keys: Any, classes: list[Any]) -> None:
    recipes = [load_object(cls._recipe_path, "") for cls in classes]
    known = {name for recipe in recipes for name in [*vars(recipe.schema()), *recipe.groups]}
    of_trl = {*trl_names(classes[0]._flat_names), "train_dataset", "eval_dataset"}
    of_trl |= {"processing_class"} | ({"reward_funcs"} if PPO in classes else set())
    assert {*keys.__annotations__} == (known | of_trl) - {"reward"}  # a parameter


def test_a_wrong_setting_found_in_a_worker_is_shown_without_its_traceback() -> None:
    @bare_errors
    def load() -> None:
        error = ConfigError("the model is damaged")
        raise RemoteError.of(error).rebuild("rank 1 of actor")

    with pytest.raises(ConfigError, match="the model is damaged") as caught:
        load()
    assert getattr(caught.value, "__notes__", []) == []


@pytest.mark.parametrize("cls", [PPO, GRPO, AsyncPPO, SFT, RewardModelTraining, DPO, KTO])
def test_the_docstring_shows_the_defaults_of_the_keys(cls: Any) -> None:
    names, recipe = cls._flat_names, load_object(cls._recipe_path, "")
    needed = ["data.train_files=x", f"{[*cls._model_sections.values()][0]}.path=y"]
    presets = [f"{group}={preset}" for group, preset in cls._presets.items()]
    config: Any = load_config([*needed, *presets], recipe)
    values = flat_config(config)
    expected = {name: values[key] for name, key in names.items()}
    if "kl_loss_coef" in names and not config.actor_rollout_ref.actor.use_kl_loss:
        expected["kl_loss_coef"] = 0
    engine = PPOConfig().actor_rollout_ref.rollout.name
    expected |= {"epochs": 1, "logger": "console", "engine": engine, "max_length": LONGEST_ROW}

    arguments = cls.__doc__.partition("\n\nArgs:\n")[2]
    shown = dict[str, object]()
    for entry in re.split(r"\n(?=    \w)", arguments):
        name = entry.partition(":")[0].strip()
        if match := re.search(r"\(default: ([^,;)]+)(?:; `(\w+)`: ([^)]+))?", entry):
            default, other, default_of_other = match.groups()
            shown[name] = ast.literal_eval(default_of_other if other == cls.__name__ else default)
    described = {"save_to", "save_every"}  # defaults in words
    assert shown == {name: expected[name] for name in names.keys() - described}
