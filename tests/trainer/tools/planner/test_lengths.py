"""Lengths of responses from a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainer.cli import plan
from verl_like.errors import ConfigError


def test_lengths_of_a_file_are_sampled_by_their_mean(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([10] * 900 + [500] * 100))
    lengths = plan.read_lengths(str(file))
    assert sum(lengths) / len(lengths) == pytest.approx(59, rel=0.1)
    assert lengths[-1] == 500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "write a list of lengths in tokens, above 0"),
        ("{", "is not a JSON list"),
        ("[" * 9000, "nested too deeply"),
        ("[3, 4000]", "has a response of 4,000 tokens, above data.max_response_length=512"),
    ],
)
def test_bad_lengths_are_rejected(tiny_dir: Path, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(text)
    options = ["--gpus=1", "--device=H100", f"--lengths={file}"]
    with pytest.raises(ConfigError, match=words):
        plan.plan([*options, f"actor_rollout_ref.model.path={tiny_dir}/model"])


def test_lengths_in_a_pipe_are_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lengths")
    with pytest.raises(ConfigError, match="is not a regular file"):
        plan.read_lengths(str(tmp_path / "lengths"))
