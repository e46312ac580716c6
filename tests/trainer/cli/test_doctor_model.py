"""`verl-like doctor --model` says from a config.json how a run treats the model, and why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.workers.models.architectures import tiny_model_config
from trainer.cli import main as cli
from workers.training import varlen
from workers.training.attention import VarlenKernel


def said(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    tiny_model_config(case).save_pretrained(folder)
    sys.argv[1:] = ["doctor", "--model", str(folder)]
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["verl-like"])


def test_each_path_of_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said("llama", tmp_path, capsys)
    assert "llama, computed by LlamaForCausalLM" in text
    assert "ok rows packed" in text
    assert "packed rows by sdpa, in rectangles" in text
    assert "persistent buffers: none" in text
    assert "native, hf or vllm" in text


def test_buffers_and_reasons_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "e_score_correction_bias" in said("deepseek_v3", tmp_path / "router", capsys)
    text = said("mamba", tmp_path / "mamba", capsys)
    assert "hf or vllm, not native: " in text
    assert "attention sdpa" not in text
    text = said("gpt_neo", tmp_path / "window", capsys)
    assert "native for rows of no more tokens than window_size=16" in text


def test_a_kernel_is_named_for_a_model_whose_scores_it_can_cap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "packed rows by matrix products with soft-capping, in rectangles" in said(
        "gemma2", tmp_path, capsys
    )
    for has_softcap, words in ((True, "by flash-attn, by their bounds"), (False, "in rectangles")):
        kernel = VarlenKernel("flash-attn", lambda *_: None, torch.bfloat16, has_softcap)
        monkeypatch.setattr(varlen, "find_kernel", lambda *_, own=kernel: (own, ""))
        assert words in said("gemma2", tmp_path, capsys)


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    sys.argv[1:] = ["doctor", "--model", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"no config\.json"):
        cli.main()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none such"}))
    with pytest.raises(SystemExit, match="none such"):
        cli.main()


@pytest.mark.parametrize("wrong", [["--model"], ["--modle", "x"], ["x"], ["--model", "x", "y"]])
def test_other_arguments_get_the_help(wrong: list[str]) -> None:
    sys.argv[1:] = ["doctor", *wrong]
    with pytest.raises(SystemExit, match="usage: verl-like doctor"):
        cli.main()
