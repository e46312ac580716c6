"""Runs in processes that torchrun started, played by processes with torchrun's variables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import draw_no_figures
from tests.forked import run_program, start_forked
from tests.integration.runs import numbers, overrides
from trainer import run
from trainer.cli.main import main
from trainer.config.compose import load_config
from trainer.ppo.recipe import PPO
from trainer.sft.recipe import SFT
from trainer.sft.step import SFTTrainer
from verl_like.errors import ConfigError, PlacementError
from verl_like.process import child
from workers.roles.sft import SFTWorker

TWO_RANKS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


class DiesOnRank1(SFTWorker):
    """Is killed in its first update."""

    def loss(self, *args: Any) -> Any:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(*args)


class GetsSIGTERM(SFTWorker):
    """As torchrun hands it on: to the processes of all ranks."""

    def loss(self, *args: Any) -> Any:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(*args)


class DriverGetsSIGTERM(SFTTrainer):
    """The driver gets it in the first step."""

    def on_step_begin(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def program() -> None:
    """`verl-like`, whose child processes are forked, too, and whose report has no figures."""
    child._start_python = start_forked
    draw_no_figures(pytest.MonkeyPatch())
    main()


def torchrun(*arguments: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """The processes of both ranks, in order, when they have ended."""
    variables = {**TWO_RANKS, "MASTER_PORT": str(os.getpid()), "TMPDIR": str(folder)}
    start = partial(run_program, program, *arguments, folder=folder)
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(start, **variables, RANK=str(r), LOCAL_RANK=str(r)) for r in range(2)]
        return [rank.result(timeout=300) for rank in ranks]


@pytest.fixture
def settings(tiny_dir: Path, tmp_path: Path) -> list[str]:
    rows = [
        {
            "prompt": f"say {letter}",
            "response": letter * 3,
            "chosen": letter * 3,
            "rejected": "z",
        }
        for letter in "abcdefgh"
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return [
        f"model.path={tiny_dir}/model",
        f"data.train_files={tmp_path}/rows.jsonl",
        "data.train_batch_size=4",
        "data.max_length=32",
        "trainer.logger=[]",
    ]


def test_torchruns_processes_give_the_numbers_of_the_local_backend(
    settings: Sequence[str], tmp_path: Path
) -> None:
    here, there = tmp_path / "local", tmp_path / "torchrun"
    ended = torchrun("sft", *settings, f"trainer.default_local_dir={there}", folder=tmp_path)
    assert [process.returncode for process in ended] == [0, 0], ended
    assert "rows" in ended[0].stderr
    assert ended[1].stdout == ended[1].stderr == ""  # one driver speaks

    local = ("trainer.backend=local", "trainer.n_gpus_per_node=2")
    run(load_config([*settings, *local, f"trainer.default_local_dir={here}"], SFT))
    assert numbers(there) == numbers(here)
    assert len(numbers(there)) == 2
    assert list(tmp_path.glob("verl-like-*/*")) == []


def test_a_rank_that_dies_ends_the_run_with_its_cause(
    settings: Sequence[str], tmp_path: Path
) -> None:
    dies = "role_workers.sft=tests.integration.test_torchrun.DiesOnRank1"
    more = (dies, f"trainer.default_local_dir={tmp_path}/run", "watch.call_s=30")
    driver, other = torchrun("sft", *settings, *more, folder=tmp_path)
    assert other.returncode == -signal.SIGKILL
    assert driver.returncode == 1
    assert "sft rank 1 of 2" in driver.stderr
    assert "has ended; torchrun, which started it, says how" in driver.stderr


def test_a_torchrun_that_is_told_to_stop_saves_its_step(
    settings: Sequence[str], tmp_path: Path
) -> None:
    here = "tests.integration.test_torchrun"
    told = f"role_workers.sft={here}.GetsSIGTERM", f"trainer.cls={here}.DriverGetsSIGTERM"
    folder = f"trainer.default_local_dir={tmp_path}/run"
    driver, other = torchrun("sft", *settings, *told, folder, folder=tmp_path)
    assert driver.returncode == 143, driver
    assert "Stopped by SIGTERM after step 1 of 2, saved in" in driver.stderr
    assert other.returncode == 0
    assert (tmp_path / "run" / "global_step_1" / "commit.json").is_file()
    assert len(numbers(tmp_path / "run")) == 1


def test_what_torchrun_decides_is_set_unless_the_user_did(
    settings: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TWO_RANKS.items():
        monkeypatch.setenv(name, value)
    trainer = load_config(settings, SFT).trainer
    assert (trainer.backend, trainer.n_gpus_per_node) == ("torchrun", 2)
    trainer = load_config([*settings, "trainer.backend=local"], SFT).trainer
    assert (trainer.backend, trainer.n_gpus_per_node) == ("local", 1)


def test_a_run_that_torchrun_cannot_hold_is_refused(
    settings: Sequence[str], tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config([*settings, "trainer.backend=torchrun"], SFT)
    with pytest.raises(ConfigError, match="torchrun did not start this process. Start it by"):
        run(config)

    for name, value in {**TWO_RANKS, "RANK": "0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    config = load_config([*settings, "trainer.n_gpus_per_node=1"], SFT)
    config.trainer.default_local_dir = str(tmp_path / "run")
    with pytest.raises(PlacementError, match="started 2 processes.*has global_pool of 1"):
        run(config)
    split = overrides(tiny_dir, tmp_path / "ppo", "placement=split")
    with pytest.raises(PlacementError, match="started 2 processes, which are the ranks of one"):
        run(load_config(split, PPO))

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(PlacementError, match="started 1 of 2 processes on this one"):
        run(config)


def test_calls_of_other_users_cannot_reach_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_like.backends.torchrun import ranks

    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = ranks._socket_path().parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(ranks.WorkerError, match="not a folder of this user alone"):
        ranks._socket_path()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "ppo", "reward-model", "dpo"])
def test_torchrun_itself_gives_the_numbers_of_the_local_backend(
    recipe: str, settings: Sequence[str], tiny_dir: Path, tmp_path: Path
) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    local = ("trainer.backend=local", "trainer.n_gpus_per_node=2")
    for name, more in (("torchrun", ()), ("local", local)):
        folder = tmp_path / name
        own = overrides(tiny_dir, folder, "placement=colocate") if recipe == "ppo" else [*settings]
        own += [*more, f"trainer.default_local_dir={folder}"]
        program = start if name == "torchrun" else [sys.executable]
        subprocess.run([*program, "-m", "trainer.cli.main", recipe, *own], check=True, timeout=300)
    assert len(numbers(tmp_path / "local")) > 1
    assert numbers(tmp_path / "torchrun") == numbers(tmp_path / "local")
