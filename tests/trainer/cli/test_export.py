"""`verl-like export`: from a run folder to a model that `from_pretrained` loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trainer import run
from trainer.cli.main import main
from trainer.config.compose import load_config
from trainer.sft.recipe import SFT


def verl_like(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["verl-like", *arguments])
    main()


@pytest.fixture(scope="module")
def run_folder(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one SFT step, saved without an export."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"prompt": "say a", "response": "aaa"}] * 2
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = [
        f"model.path={tiny_dir}/model",
        f"data.train_files={folder}/rows.jsonl",
        f"trainer.default_local_dir={folder}/run",
        "data.train_batch_size=2",
        "data.max_length=32",
        "model.lora_rank=2",
        "trainer.save_freq=1",
        "trainer.save_final=false",
        "trainer.backend=local",
        "trainer.logger=[]",
    ]
    run(load_config(settings, SFT))
    return folder / "run"


def test_a_run_folder_becomes_a_model_folder(
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    verl_like(monkeypatch, "export", str(run_folder), str(tmp_path / "out"))
    said = f"{tmp_path}/out: the model of {run_folder}/global_step_1/sft, trained from"
    assert capsys.readouterr().out.startswith(said)
    names = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert not any("lora" in name for name in names)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token == "<pad>"


def test_a_used_folder_is_left_alone(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SystemExit,
        match="error: .*is a file, or a folder with files. Choose a folder that does not exist",
    ):
        verl_like(monkeypatch, "export", str(run_folder), str(run_folder))
