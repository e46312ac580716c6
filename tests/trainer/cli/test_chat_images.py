"""`verl-like chat` reads images, and `verl-like eval` evaluates a run on rows with images."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from tests.integration.test_image_turns import environment_of
from tests.integration.test_images import overrides, write_rows
from tests.workers.models.vision import write_model
from trainer import load_config, run
from trainer.cli import chat as command
from trainer.cli import eval as evaluation
from verl_like.errors import ConfigError
from workers.models.images import ImageReader


def of_transformers(
    folder: Path,
    paths: list[Path],
    text: str,
    max_tokens: int,
    before: Sequence[dict[str, Any]] = (),
    num_before: int = 0,
) -> str:
    """Return the greedy response of the published classes of transformers.

    The last message has all images except the first `num_before`, which are in messages `before`.
    """
    from transformers import AutoModelForImageTextToText

    processor = ImageReader(str(folder)).processor
    model = AutoModelForImageTextToText.from_pretrained(folder)
    parts = [{"type": "image"} for _ in paths[num_before:]] + [{"type": "text", "text": text}]
    messages = [*before, {"role": "user", "content": parts}]
    chat = processor.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    images = [Image.open(path).convert("RGB") for path in paths]
    inputs = processor(images=images, text=[chat], add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
    response = tokens[0, inputs["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(response, skip_special_tokens=True))


@pytest.mark.parametrize("family", ["qwen2_vl", "internvl"])
def test_a_message_with_images_has_the_response_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path)
    folder = write_model(family, tmp_path / "model")
    paths = [rows.parent / "0.png", Path(shutil.copy(rows.parent / "1.png", tmp_path / "a b.png"))]
    lines = "".join(f"/image {path}\n" for path in paths)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{lines}What is it?\n"))
    command.main([str(folder), "--max-tokens", "6"])
    expected = of_transformers(folder, paths, "What is it?", 6)
    assert expected
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")


def test_on_a_terminal_an_image_waits_for_its_message_and_a_typo_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path)
    folder = write_model("qwen2_vl", tmp_path / "model")
    chat = command.Chat(folder, system="", max_tokens=6, temperature=0.0)
    typed = Mock(side_effect=["/image no.png", "Hi", f"/image {rows.parent}/0.png", "Hi", EOFError])
    monkeypatch.setattr("builtins.input", typed)
    command.talk(chat)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "the image no.png is not readable: No such file or directory."
    expected = of_transformers(folder, [rows.parent / "0.png"], "Hi", 6)
    assert "\n".join(printed[2:]).strip("\n") == expected.strip("\n")
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


def test_a_later_message_may_have_images_of_other_sizes(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    folder = write_model("qwen2_vl", tmp_path / "model")
    chat = command.Chat(folder, system="", max_tokens=6, temperature=0.0)
    paths = [rows.parent / f"{number}.png" for number in range(3)]
    chat.answer(f"/image {paths[0]}\nHi")
    reply = chat.answer(f"/image {paths[1]}\n/image {paths[2]}\nAnd now?")
    parts = [{"type": "image"}, {"type": "text", "text": "Hi"}]
    before = [{"role": "user", "content": parts}, chat.messages[1]]
    assert reply == of_transformers(folder, paths, "And now?", 6, before, num_before=1)


def test_a_trajectory_shows_the_images_of_its_environment_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment_of(tmp_path)
    folder = write_model("qwen2_vl", tmp_path / "model")
    inputs: list[Any] = []
    generate = command.Chat.generate

    def note(chat: Any, given: Any, **overrides: Any) -> list[int]:
        inputs.append(given)
        return generate(chat, given, **overrides)

    monkeypatch.setattr(command.Chat, "generate", note)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    row = {"extra_info": {"number": 1}}
    arguments = ["--max-tokens", "5", "--row", json.dumps(row)]
    arguments += ["--kwargs", json.dumps({"folder": str(tmp_path)})]
    command.main([str(folder), "--environment", f"{tmp_path}/game.py:Looks", *arguments])
    printed = capsys.readouterr().out
    assert "environment: '<image>is it?'" in printed
    assert "environment: '<image><image>and now?'" in printed
    assert "3 turns, reward" in printed
    assert [len(given["image_grid_thw"]) for given in inputs] == [1, 3, 3]
    token = ImageReader(str(folder)).token_id
    for given in inputs:
        count = int((given["input_ids"] == token).sum())
        assert count == int(given["image_grid_thw"].prod(dim=1).sum()) // 4


def test_a_text_model_rejects_an_image(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {rows.parent}/0.png\nHi"))
    with pytest.raises(ConfigError, match="does not read images"):
        command.main([f"{tiny_dir}/model"])


def test_a_marker_without_an_image_is_rejected_by_a_model_with_eyes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model("qwen2_vl", tmp_path / "model")
    monkeypatch.setattr("sys.stdin", io.StringIO("<image>Hi"))
    with pytest.raises(ConfigError, match=r"contains <image>, but.*A line /image PATH before"):
        command.main([str(model)])


@pytest.mark.long
def test_eval_reads_a_run_with_images_and_results_have_them(tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    model = write_model("qwen2_vl", tmp_path / "model")
    result = run(load_config(overrides(rows, model, tmp_path / "run", f"data.val_files={rows}")))
    samples = result.samples()
    shown = {sample["uid"]: [image["path"] for image in sample["images"]] for sample in samples}
    numbers = {uid: int(uid.partition("-")[0]) for uid in shown}
    for uid, paths in shown.items():
        names = json.loads(rows.read_text().splitlines()[numbers[uid]])["images"]
        assert paths == [str(tmp_path / name) for name in names]
    assert 'src="data:image/jpeg' in result.report.read_text(encoding="utf-8")

    evaluation.main([str(tmp_path / "run")])
    (folder,) = (tmp_path / "run/eval").iterdir()
    (metrics,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    validated = result.metrics[-1]["val-core/prompts/reward/mean@1"]
    assert metrics["val-core/prompts/reward/mean@1"] == pytest.approx(validated)
