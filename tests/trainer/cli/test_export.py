"""`verl-like export`: from a run folder to a model that `from_pretrained` loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainer import SFT
from trainer.cli.main import main


def verl_like(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["verl-like", *arguments])
    main()


@pytest.fixture(scope="module")
def run_folder(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one SFT step, saved without an export."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"prompt": "say a", "response": "aaa"}] * 2
    keys = {"model.lora_rank": 2, "trainer.save_freq": 1, "trainer.save_final": False}
    SFT(tiny_dir / "model", rows, save_to=folder, batch_size=2, logger=[], **keys).fit()
    return folder


def test_a_run_folder_becomes_a_model_folder(
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    verl_like(monkeypatch, "export", str(run_folder), str(tmp_path / "out"))
    line = f"{tmp_path}/out: the model of {run_folder}/global_step_1/sft, trained from"
    assert capsys.readouterr().out.startswith(line)
    names = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert not any("lora" in name for name in names)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").pad_token == "<pad>"


def test_a_folder_with_files_is_rejected(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SystemExit,
        match="error: .*is a file, or a folder with files. Choose a folder that does not exist",
    ):
        verl_like(monkeypatch, "export", str(run_folder), str(run_folder))
