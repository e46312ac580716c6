"""`verl-like eval` repeats the numbers of a run's validation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, lines, overrides
from trainer import run
from trainer.cli.eval import main, settings_of_run
from trainer.config.keys import flat_config
from trainer.config.settings import overrides_of
from trainer.ppo.recipe import load_config
from trainer.recipe_command import run_command
from trainer.run_folder.saved_model import SavedModel
from trainer.tools.evaluation.recipe import EVAL, EvaluationConfig
from workers.config import ModelConfig

CORE = ("mean@4", "best@4/mean")


@pytest.fixture(scope="module")
def trained(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, validated with four samples per prompt."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    more = [
        f"data.val_files=[{tiny_dir}/val.parquet]",
        "actor_rollout_ref.rollout.val_kwargs={n: 4, do_sample: true, temperature: 0.7}",
        "actor_rollout_ref.actor.ema_decay=null",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.val_before_train=false",
        "trainer.save_freq=2",
        "trainer.seed=3",
        "trainer.backend=local",
    ]
    run(load_config(overrides(tiny_dir, folder, *POLICY_ALONE, *more)))
    return folder


def validation(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name.startswith("val-")}


@pytest.mark.long
def test_an_evaluation_repeats_the_last_validation(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(trained), "trainer.logger=[]", "data.train_batch_size=5"])
    (line,) = lines(trained / "eval" / "global_step_2")
    expected = validation(lines(trained)[-1])
    assert validation(line) == expected
    assert len(expected) > 10
    core = [expected[f"val-core/verl_like/tiny_letters/reward/{m}"] for m in CORE]
    shown = [text.split() for text in capsys.readouterr().out.splitlines()]
    assert ["data", "source", "variable", "mean@4", "best@4"] in shown
    assert ["verl_like/tiny_letters", "reward", *(f"{value:.4g}" for value in core)] in shown


def test_a_model_folder_is_evaluated_on_several_data_sets(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": [{"role": "user", "content": "say b"}], "data_source": "mine"}
    reward = {"style": "rule", "ground_truth": "b"}
    (tmp_path / "own.jsonl").write_text(json.dumps({**row, "reward_model": reward}))
    (tmp_path / "length.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(solution_str))\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = [
        f"data.val_files=[{tiny_dir}/val.parquet,own.jsonl]",
        "reward.function.path=length.py",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "trainer.logger=[]",
    ]
    main([f"{tiny_dir}/model", *settings])
    (line,) = lines(tmp_path / "runs" / "eval" / "model")
    assert 0 <= line["val-core/mine/reward/mean@1"] <= 8
    assert "val-core/verl_like/tiny_letters/reward/mean@1" in line
    main([f"{tiny_dir}/model", *settings])  # again, into the same folder


def configuration(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], *arguments: str
) -> EvaluationConfig:
    """Return the evaluation's configuration for these settings of the run and the user."""
    configs: list[EvaluationConfig] = []
    monkeypatch.setattr("trainer.launch.run", configs.append)
    run_command(EVAL, arguments, overrides_of(settings))
    return configs[0]


def test_only_training_settings_of_the_user_get_a_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {
        "actor_rollout_ref.model.path": "m",
        "data.val_files": "v",
        "actor_rollout_ref.rollout.n": 8,
    }
    assert configuration(monkeypatch, settings).actor_rollout_ref.rollout.n == 8
    assert "has no effect" not in caplog.text
    configuration(monkeypatch, settings, "actor_rollout_ref.rollout.n=4")
    assert "rollout.n has no effect: an evaluation samples by rollout.val_kwargs" in caplog.text
    with pytest.raises(SystemExit, match="data.val_files is empty"):
        configuration(monkeypatch, settings | {"data.val_files": ""})
    settings |= {"data.val_files": "", "environment.path": "guess.py:Guess"}
    with pytest.raises(SystemExit, match=r"makes its prompts, their number \(data.val_files=100\)"):
        configuration(monkeypatch, settings)


def test_a_command_without_a_model_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.cli.main import main as verl_like

    monkeypatch.setattr(sys, "argv", ["verl-like", "eval", "data.val_files=x"])
    with pytest.raises(SystemExit, match="error: verl-like eval needs a model"):
        verl_like()


def test_validation_settings_of_the_run_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = load_config(
        [
            "actor_rollout_ref.model.path=m",
            "data.train_files=t",
            "data.val_files=[v.parquet,'with space.jsonl']",
            "data.sampler=my.order",
            "reward.list=[{name: a, kind: function, path: r.py, kwargs: {k: 2}}, {name: b,"
            " weight: 0.5, kind: remote, url: 'http://127.0.0.1:1/score'}]",
            "actor_rollout_ref.rollout.sampling_kwargs={stop_strings: ['\\n\\n', x], min_p: 0.1}",
            "actor_rollout_ref.rollout.val_kwargs={n: 3, do_sample: true, top_p: 0.9}",
            "trainer.seed=11",
        ]
    )
    model, flat = trained.actor_rollout_ref.model, flat_config(trained)
    saved = SavedModel(tmp_path, 1, tmp_path, model, flat)
    settings = settings_of_run(saved) | {"actor_rollout_ref.model.path": "m"}
    config = configuration(monkeypatch, settings, "data.max_response_length=7")
    assert config.data.max_response_length == 7
    assert config.data.val_files == ["v.parquet", "with space.jsonl"]
    assert config.reward.list == trained.reward.list
    rollout, expected = config.actor_rollout_ref.rollout, trained.actor_rollout_ref.rollout
    assert rollout.sampling_kwargs == expected.sampling_kwargs
    assert rollout.val_kwargs == expected.val_kwargs
    assert config.trainer.seed == 11


def test_verls_reward_names_of_the_run_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = {
        "actor_rollout_ref.model.path": "m",
        "data.val_files": "v",
        "custom_reward_function.path": "f.py",
        "custom_reward_function.reward_kwargs.k": 2,
        "reward_model.enable": True,
        "reward_model.model.path": "judge",
    }
    saved = SavedModel(tmp_path, 1, tmp_path, ModelConfig(), flat)
    config = configuration(monkeypatch, settings_of_run(saved), "actor_rollout_ref.model.path=m")
    assert (config.reward.function.path, config.reward.function.kwargs) == ("f.py", {"k": 2})
    assert (config.reward.model.enable, config.reward.model.path) == (True, "judge")
