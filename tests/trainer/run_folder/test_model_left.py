"""The trained model that every run leaves in `model/` of its folder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.integration.runs import POLICY_ALONE, overrides
from trainer import SFT, load_config, run
from trainer.cli import chat, export
from trainer.cli.eval import model_and_settings
from trainer.config.recipe import Recipe
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT as SFT_RECIPE

ROW = {"prompt": "say a", "response": "aaaa", "chosen": "aaaa", "rejected": "bbbb"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.fixture(scope="module")
def ended(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of two steps, the last of which has a checkpoint with an export."""
    folder = tmp_path_factory.mktemp("ended")
    saved = "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]"
    settings = ("trainer.backend=local", "trainer.total_training_steps=2", "trainer.save_freq=2")
    run(load_config(overrides(tiny_dir, folder, *settings, *POLICY_ALONE, saved)))
    return folder


def test_it_is_that_of_the_last_step(ended: Path, tiny_dir: Path) -> None:
    left, exported = weights(ended / "model"), ended / "global_step_2/actor/huggingface"
    assert all(torch.equal(value, left[name]) for name, value in weights(exported).items())
    before = weights(tiny_dir / "model")
    assert any(not torch.equal(value, left[name]) for name, value in before.items())


def test_commands_take_the_run_folder(
    ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    export.main([str(ended), str(tmp_path / "out")])
    assert "commit.json" not in {path.name for path in (tmp_path / "out").iterdir()}
    assert weights(tmp_path / "out").keys() == weights(ended / "model").keys()
    model, settings = model_and_settings(str(ended), tmp_path)
    assert model == ended / "model"
    assert settings["trainer.default_local_dir"] == str(ended / "eval" / "global_step_2")
    assert settings["data.max_prompt_length"] == 16
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("say a"))
    chat.main([str(ended), "--max-tokens", "2"])
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [(["trainer.save_final=false"], "no model will be saved"), ([], "Final model:")],
)
def test_the_plan_and_the_last_lines_say_what_is_left(
    settings: list[str],
    words: str,
    tiny_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = ("trainer.backend=local", "trainer.total_training_steps=1", *POLICY_ALONE)
    run(load_config(overrides(tiny_dir, tmp_path, *one, *settings)))
    out = capsys.readouterr().out
    assert words in out
    assert ("no model was saved (trainer.save_final=false" in out) == (len(settings) == 1)
    assert (tmp_path / "model").is_dir() == (f"model: {tmp_path}/model" in out) == (not settings)


@pytest.mark.parametrize("recipe", [SFT_RECIPE, REWARD_MODEL, DPO], ids=lambda r: r.name)
def test_every_recipe_leaves_a_model(recipe: Recipe, tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(ROW)] * 8))
    settings = [
        f"model.path={tiny_dir}/model",
        f"data.train_files={tmp_path}/rows.jsonl",
        f"trainer.default_local_dir={tmp_path}/run",
        "data.train_batch_size=8",
        "trainer.backend=local",
        "trainer.logger=[]",
    ]
    result = run(load_config(settings, recipe))
    assert result.model_folder == tmp_path / "run" / "model"
    is_scorer = recipe is REWARD_MODEL
    loads = AutoModelForSequenceClassification if is_scorer else AutoModelForCausalLM
    assert loads.from_pretrained(result.model_folder).config.model_type == "llama"


def test_a_run_from_python_goes_on_and_leaves_the_newest(tiny_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "say a", "response": "aaaa"}] * 8
    keys = {"data": {"train_batch_size": 4}, "optim": {"lr": 1e-3}}
    sft = SFT(str(tiny_dir / "model"), rows, save_to=tmp_path, **keys)
    first = sft.fit(steps=1).model_folder
    assert first == tmp_path / "model"
    before = weights(first)
    again = weights(sft.fit(steps=1).model_folder)
    assert any(not torch.equal(value, again[name]) for name, value in before.items())
