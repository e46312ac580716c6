"""The trained model in `model/` of a run folder. The tests of each recipe load it, too."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, overrides
from trainer import SFT, load_config, run
from trainer.cli import chat, export
from trainer.cli.eval import model_and_settings
from verl_like.errors import DamagedCheckpointError

SHORT = ("trainer.backend=local", *POLICY_ALONE, *FEW_ROWS)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.fixture(scope="module")
def ended(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of two steps, the last of which has a checkpoint with an export."""
    folder = tmp_path_factory.mktemp("ended")
    saved = "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]"
    settings = ("trainer.total_training_steps=2", "trainer.save_freq=2", saved)
    run(load_config(overrides(tiny_dir, folder, *SHORT, *settings)))
    return folder


def test_the_model_has_the_weights_of_the_last_step(ended: Path, tiny_dir: Path) -> None:
    final, exported = weights(ended / "model"), ended / "global_step_2/actor/huggingface"
    assert all(torch.equal(value, final[name]) for name, value in weights(exported).items())
    before = weights(tiny_dir / "model")
    assert any(not torch.equal(value, final[name]) for name, value in before.items())


def test_commands_accept_the_run_folder(
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


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("place", ["", "model", "global_step_2"])
def test_commands_name_a_file_with_a_flipped_byte(
    ended: Path, tmp_path: Path, name: str, place: str
) -> None:
    folder = Path(shutil.copytree(ended, tmp_path / "run"))
    exported = "global_step_2/actor/huggingface" if place == "global_step_2" else "model"
    file = folder / exported / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=f"{name} has crc32 .*, but was written with"):
        model_and_settings(str(folder / place), tmp_path / "scratch")
    with pytest.raises(DamagedCheckpointError, match=f"{name} has crc32 .*, but was written with"):
        chat.main([str(folder / place)])


@pytest.mark.parametrize(
    ("settings", "words"),
    [(["trainer.save_final=false"], "no model will be saved"), ([], "Final model:")],
)
def test_the_plan_and_the_last_lines_name_the_model(
    settings: list[str],
    words: str,
    tiny_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one_step = "trainer.total_training_steps=1"
    run(load_config(overrides(tiny_dir, tmp_path, *SHORT, one_step, *settings)))
    out = capsys.readouterr().out
    assert words in out
    assert ("no model was saved (trainer.save_final=false" in out) == (len(settings) == 1)
    assert (tmp_path / "model").is_dir() == (f"model: {tmp_path}/model" in out) == (not settings)


def test_a_second_fit_from_python_replaces_the_model(tiny_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "say a", "response": "aaaa"}] * 8
    keys = {"data": {"train_batch_size": 4}, "optim": {"lr": 1e-3}}
    sft = SFT(str(tiny_dir / "model"), rows, save_to=tmp_path, **keys)
    first = sft.fit(steps=1).model_folder
    assert first == tmp_path / "model"
    before = weights(first)
    again = weights(sft.fit(steps=1).model_folder)
    assert any(not torch.equal(value, again[name]) for name, value in before.items())
