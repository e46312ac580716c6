"""A reward server gives the numbers of the function in process, and no server is left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, bash
from tests.integration.runs import lines

REMOTE = EXAMPLES / "remote_reward" / "run.sh"


@pytest.fixture(scope="module")
def remote_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the example with a reward server; its tiny model is created once."""
    return tmp_path_factory.mktemp("remote")


def server_has_ended(shown: str) -> bool:
    process = re.search(r"answers at http\S+ \(process (\d+)\)", shown)[1]
    return not Path(f"/proc/{process}").exists()


@pytest.mark.long
@pytest.mark.example
def test_a_reward_server_gives_the_numbers_of_the_function_in_process(
    remote_dir: Path, forked_python: Path
) -> None:
    two_steps = "trainer.total_training_steps=2"
    done = bash(REMOTE, two_steps, RUN_DIR=remote_dir, PYTHON=forked_python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same texts and numbers in all 128 samples of 2 steps" in done.stdout
    assert server_has_ended(done.stdout)

    remote, in_process = lines(remote_dir / "remote"), lines(remote_dir / "in_process")
    for name in ("critic/score/mean", "reward/num_characters/mean", "actor/grad_norm"):
        assert [step[name] for step in remote] == [step[name] for step in in_process]
        assert all(step[name] > 0 for step in remote), name

    samples = remote_dir / "in_process" / "rollouts" / "2.jsonl"
    text = samples.read_text()
    samples.write_text(text.replace('"judge_score": 0.', '"judge_score": 0.5', 1))
    compare = [sys.executable, str(REMOTE.parent / "compare.py")]
    folders = [str(remote_dir / "remote"), str(remote_dir / "in_process")]
    compared = subprocess.run([*compare, *folders], capture_output=True, text=True, check=False)
    assert compared.returncode == 1
    assert "the samples of the two runs differ" in compared.stderr


@pytest.mark.long
@pytest.mark.example
def test_a_reward_server_ends_with_the_run_that_fails(remote_dir: Path) -> None:
    done = bash(REMOTE, "trainer.no_such_key=1", RUN_DIR=remote_dir, PYTHON=sys.executable)
    assert done.returncode != 0
    assert "no_such_key" in done.stderr
    assert server_has_ended(done.stdout)
