"""GRPO on GSM8K: the script learns with a tiny model, and its settings compose for GPUs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, bash
from tests.integration.runs import lines
from trainer import load_config
from trainer.launch import nominal_placement

SCRIPT = EXAMPLES / "gsm8k" / "run.sh"
PAGE = EXAMPLES.parent / "docs" / "grpo_gsm8k.md"


@pytest.mark.long
@pytest.mark.example
def test_the_script_learns_with_a_tiny_model(tmp_path: Path, forked_python: Path) -> None:
    settings = ("trainer.total_training_steps=8", "trainer.val_before_train=false")
    done = bash(SCRIPT, *settings, TINY=1, RUN_DIR=tmp_path, PYTHON=forked_python)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [line["critic/score/mean"] for line in lines(tmp_path) if "timing_s/step" in line]
    assert len(rewards) == 8
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    assert (tmp_path / "model" / "config.json").is_file()


def settings_of_the_script() -> list[str]:
    """Return the settings of the run with a real model."""
    command = SCRIPT.read_text().replace("\\\n", " ").partition("-m trainer.main_ppo")[2]
    command = command.partition("${changes")[0]
    return [word.replace("$", "") for word in shlex.split(command)]


COMMANDS = re.findall(
    r"^(?:\w+=\S+ )*bash examples/gsm8k/run\.sh(.*)$",
    PAGE.read_text(encoding="utf-8").replace("\\\n", " "),
    re.M,
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_composes_and_fits(command: str) -> None:
    config = load_config([*settings_of_the_script(), *shlex.split(command, comments=True)])
    nominal_placement(config)
    assert config.actor_rollout_ref.rollout.n == 8
