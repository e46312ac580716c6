"""`verl-like export`: from a run folder to a model that `from_pretrained` loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.runs import (
    FEW_ROWS,
    POLICY_ALONE,
    overrides,
    overrides_on_rows,
    write_jsonl,
)
from trainer import SFT
from trainer.cli.main import main

BATCH = ("data.train_batch_size=4", "trainer.total_training_steps=1")
GRPO = (
    *POLICY_ALONE,
    *FEW_ROWS,
    *("trainer.backend=local", "trainer.save_freq=1", "trainer.total_training_steps=1"),
)
MODEL_KEY = "actor_rollout_ref.model.path="


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


def test_a_finished_lora_run_has_its_adapter_without_a_checkpoint(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    rows = [{"prompt": "say a", "response": "aaa"}] * 2
    base, run = tiny_dir / "model", tmp_path / "run"
    keys = {"model.lora_rank": 2, "trainer.save_freq": -1}
    SFT(base, rows, save_to=run, batch_size=2, lr=0.1, logger=[], **keys).fit()
    verl_like(monkeypatch, "export", str(run), str(tmp_path / "adapter"), "--adapter")
    verl_like(monkeypatch, "export", str(run), str(tmp_path / "merged"))
    assert not (tmp_path / "merged" / "lora_adapter").exists()
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    )
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    theirs = adapted.merge_and_unload().state_dict()
    untrained = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert any(not torch.equal(ours[name], untrained[name]) for name in ours)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight)


def test_a_folder_with_files_is_rejected(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SystemExit,
        match="error: .*is a file, or a folder with files. Choose a folder that does not exist",
    ):
        verl_like(monkeypatch, "export", str(run_folder), str(run_folder))


def test_a_chain_of_runs_is_exported_after_each_run(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    rows = [{"prompt": "say a", "response": "aaa"}] * 4
    files = {"train": write_jsonl(tmp_path / "rows.jsonl", rows)}
    verl_like(monkeypatch, "sft", *overrides_on_rows(tiny_dir, files, tmp_path / "sft"), *BATCH)
    model = tmp_path / "sft" / "model"
    for name in ("first", "second"):
        folder, out = tmp_path / name, tmp_path / f"{name}-model"
        settings = overrides(tiny_dir, folder, *GRPO)
        settings = [setting for setting in settings if not setting.startswith(MODEL_KEY)]
        verl_like(monkeypatch, "ppo", *settings, f"{MODEL_KEY}{model}")
        verl_like(monkeypatch, "export", str(folder), str(out))
        verl_like(monkeypatch, "export", f"{folder}/global_step_1", f"{out}-of-step")
        for exported in (out, Path(f"{out}-of-step")):
            AutoModelForCausalLM.from_pretrained(exported)
            assert not (exported / "commit.json").exists()
        model = out


@pytest.mark.parametrize("command", [("export", "RUN"), ("make-tiny",)])
def test_an_output_folder_below_a_file_is_rejected(
    command: tuple[str, ...], run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    arguments = [str(run_folder) if word == "RUN" else word for word in command]
    with pytest.raises(SystemExit, match="file/out cannot be written: .*/file is not a folder"):
        verl_like(monkeypatch, *arguments, f"{tmp_path}/file/out")
