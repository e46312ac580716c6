"""`verl-like chat` prints the responses of the model, and only these into a pipe."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from trainer.cli import chat as command
from trainer.cli.chat import Chat, talk
from trainer.cli.eval import model_and_settings
from verl_like.errors import ConfigError, VerlLikeError


def greedy(folder: Path, messages: list[dict[str, str]], max_tokens: int) -> str:
    """Return the greedy response, with one forward pass per token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    start = len(ids)
    with torch.no_grad():
        for _ in range(max_tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 1 // 0 }}", "the chat template rejects it: "),
        ("{{ 'x' * 5000000 }}", "it has 5,000,000 characters, more than"),
    ],
)
def test_a_template_that_fails_is_an_error(
    template: str, words: str, tiny_dir: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_dir / "model", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(VerlLikeError, match=words):
        Chat(folder, system="", max_tokens=1, temperature=0.0).answer("say a")


def test_a_conversation_has_a_history(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(tiny_dir / "model", system="", max_tokens=6, temperature=0.0)
    first = chat.answer("say a")
    assert first == greedy(tiny_dir / "model", [user("say a")], 6)
    assert capsys.readouterr().out.rstrip("\n") == first.rstrip("\n")
    history = [user("say a"), {"role": "assistant", "content": first}, user("say b")]
    second = chat.answer("say b")
    assert second == greedy(tiny_dir / "model", history, 6)
    chat.forget()
    assert chat.answer("say a") == first


def test_a_pipe_is_one_message_and_gets_only_the_response(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("say a\n"))
    command.main([f"{tiny_dir}/model", "--max-tokens", "6"])
    response = greedy(tiny_dir / "model", [user("say a")], 6)
    assert capsys.readouterr().out.rstrip("\n") == response.rstrip("\n")


def test_a_model_of_the_hub_is_downloaded(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def snapshot_download(name: str, **_: Any) -> str:
        assert name == "someone/tiny-chat"
        return f"{tiny_dir}/model"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("sys.stdin", io.StringIO("say a\n"))
    command.main(["someone/tiny-chat", "--max-tokens", "6"])
    assert capsys.readouterr().out
    model, settings = model_and_settings("someone/tiny-chat", tiny_dir)
    assert model == tiny_dir / "model"
    assert settings["trainer.default_local_dir"] == "runs/eval/tiny-chat"


def test_a_seed_repeats_the_sampled_response(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    responses = []
    for seed in ("1", "1", "2"):
        monkeypatch.setattr("sys.stdin", io.StringIO("say a"))
        command.main([f"{tiny_dir}/model", "--max-tokens=8", "--temperature=1", "--seed", seed])
        responses.append(capsys.readouterr().out)
    assert responses[0] == responses[1] != responses[2]


def test_a_terminal_is_read_until_it_ends(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = Mock(side_effect=["say a", "", "/new", "say a", EOFError])
    monkeypatch.setattr("builtins.input", typed)
    chat = Chat(tiny_dir / "model", system="", max_tokens=6, temperature=0.0)
    talk(chat)
    response = greedy(tiny_dir / "model", [user("say a")], 6)
    assert len(chat.messages) == 2
    first = "/new starts a new conversation, /image PATH adds an image, Ctrl-D ends"
    expected = f"{first}\n{response}\n{response}\n\n"
    assert capsys.readouterr().out == expected


def test_a_classifier_and_zero_tokens_are_rejected(classifier: Path, tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="LlamaForSequenceClassification: it scores"):
        Chat(classifier, system="", max_tokens=6, temperature=0.0)
    with pytest.raises(ConfigError, match="--max-tokens=0 .* the first must be 1 or more"):
        command.main([f"{tiny_dir}/model", "--max-tokens", "0"])


def test_weights_that_do_not_load_are_an_error(tiny_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_dir / "model", tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"[" * 1000)
    with pytest.raises(ConfigError, match="cannot load a model from its weights"):
        Chat(folder, system="", max_tokens=1, temperature=0.0)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "[1]", "cannot load a tokenizer from"),
        ("tokenizer.json", "{}", "cannot load a tokenizer from"),
        ("tokenizer.json", '{"version": ', "cannot load a tokenizer from"),
        ("special_tokens_map.json", "7", "special_tokens_map.json is damaged: it holds 7"),
        ("tokenizer_config.json", "null", "tokenizer_config.json is damaged: it holds None"),
        ("generation_config.json", "", "generation_config.json is damaged"),
        ("generation_config.json", '{"eos_token_id": "a"}', "the model cannot|cannot load a model"),
        ("config.json", "{}", "config.json does not describe a model: Unrecognized model"),
        ("config.json", '{"model_type": 7}', "config.json does not describe a model"),
        ("chat_template.jinja", "", "the message has no tokens. Check its chat template"),
    ],
)
def test_a_damaged_file_of_the_model_is_an_error(
    name: str, content: str, words: str, tiny_dir: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_dir / "model", tmp_path / "model")
    (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        Chat(folder, system="", max_tokens=1, temperature=0.0).answer("say a")
