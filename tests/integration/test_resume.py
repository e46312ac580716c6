"""A run that is killed at any moment and restarted writes the metrics of an unbroken run."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT
from tests.conftest import draw_no_figures
from tests.forked import Descriptors
from tests.integration.runs import calls, lines, numbers, overrides
from trainer import load_config, run
from trainer.run_folder.signals import RunInterrupted
from verl_like.errors import CheckpointError

STEPS = 6
SETTINGS = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=20",
    f"trainer.total_training_steps={STEPS}",
    "trainer.critic_warmup=1",
    "trainer.save_freq=2",
    "trainer.max_ckpt_to_keep=2",
)
LOCAL = ("trainer.backend=local", "trainer.n_gpus_per_node=1")
ACTORS = "role_workers.actor=tests.integration.background_actors"


def settings_of(tiny: Path, folder: Path, *more: str) -> list[str]:
    return overrides(tiny, folder, *SETTINGS, *more)


def start(settings: list[str]) -> Any:
    """Start a process that runs these settings."""
    ray_token = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    process = multiprocessing.get_context("forkserver").Process(
        target=_run_beside, args=(settings, ray_token, Descriptors())
    )
    process.start()
    return process


def _run_beside(settings: list[str], environment: dict[str, str], _output: None) -> None:
    os.environ.update(environment)
    run_settings(settings)


def run_settings(settings: list[str]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        draw_no_figures(monkeypatch)
        run(load_config(settings))


def finish(process: Any) -> None:
    process.join(120)
    assert process.exitcode == 0


def kill(process: Any, folder: Path, num_lines: int, seconds: float) -> None:
    """`kill -9` a moment after so many lines are written."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 60
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < num_lines:
        assert time.monotonic() < deadline, "the run writes no lines"
        assert process.is_alive(), "the run ended before it could be killed"
        time.sleep(0.002)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def names_of_checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("global_step_*"))


@pytest.fixture(scope="module")
def unbroken(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("unbroken")
    finish(start(settings_of(tiny_dir, folder, *LOCAL)))
    assert [line["step"] for line in lines(folder)] == list(range(1, STEPS + 1))
    saved = [line["step"] for line in lines(folder) if "timing_s/save_checkpoint" in line]
    assert saved == [2, 4, 6]
    return folder


def test_a_killed_run_resumes_bit_for_bit(unbroken: Path, tiny_dir: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1000)
    chance = random.Random(seed)
    settings = settings_of(tiny_dir, tmp_path, *LOCAL)
    kill(start(settings), tmp_path, chance.randint(2, STEPS - 2), chance.random() * 0.1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')
    finish(start(settings))
    assert numbers(tmp_path) == numbers(unbroken), f"chance {seed}"
    assert names_of_checkpoints(tmp_path) == ["global_step_4", "global_step_6"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    assert calls(tmp_path, "load_checkpoint")


@pytest.mark.long
def test_a_run_killed_during_a_background_write_resumes_bit_for_bit(
    unbroken: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny_dir, tmp_path, *LOCAL, f"{ACTORS}.KilledActor")
    for last_committed, unfinished in (([], 2), (["global_step_2"], 4)):
        process = start(settings)
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        committed = tmp_path.glob("global_step_*/commit.json")
        assert [path.parent.name for path in committed] == last_committed
        shards = tmp_path / f"global_step_{unfinished}.part" / "actor" / "shards"
        assert (shards / "0.safetensors").is_file()
    finish(start(settings))
    assert numbers(tmp_path) == numbers(unbroken)


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Return all files but the run's settings and the driver's random state."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    contents = {path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in files}
    del contents["commit.json"], contents["random.json"]
    return contents


class StopInStep5:
    """A callback that sends SIGTERM while the checkpoint of step 4 is written."""

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.long
def test_steps_run_during_a_background_write_and_a_signal_commits_it_and_the_last_step(
    unbroken: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny_dir, tmp_path, *LOCAL, f"{ACTORS}.HeldBackActor")
    with pytest.raises(RunInterrupted, match="SIGTERM after step 5 of 6, saved in .*global_step_5"):
        run(load_config(settings), callbacks=[StopInStep5()])
    committed = sorted(path.parent.name for path in tmp_path.glob("global_step_*/commit.json"))
    assert committed == ["global_step_4", "global_step_5"]
    (written,) = [c for c in calls(tmp_path, "write_checkpoint") if c["args"]["step"] in (5, 6)][:1]
    (saved,) = [c for c in calls(tmp_path, "start_checkpoint") if c["args"]["step"] == 4][:1]
    (updated,) = [c for c in calls(tmp_path, "update_actor") if c["args"]["step"] == 5]
    assert saved["ts"] < updated["ts"] < written["ts"] + written["dur"]
    assert files_of(tmp_path / "global_step_4") == files_of(unbroken / "global_step_4")
    run_settings(settings)
    assert numbers(tmp_path) == numbers(unbroken)


def test_a_failed_background_write_ends_the_run_and_leaves_no_checkpoint(
    tiny_dir: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny_dir, tmp_path, *LOCAL, f"{ACTORS}.FailingActor")
    with pytest.raises(CheckpointError, match="step 4 was not written: .*rank 0: .*no space left"):
        run_settings(settings)
    assert names_of_checkpoints(tmp_path) == ["global_step_2"]
    assert len(lines(tmp_path)) in (4, 5, 6)  # steps go on until the write has failed


def test_a_run_with_a_damaged_newest_checkpoint_resumes_from_the_previous_one(
    unbroken: Path, tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(unbroken, tmp_path / "copy"))
    shard = folder / f"global_step_{STEPS}" / "actor" / "shards" / "0.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # same size, so only the rank that loads it notices
    shard.write_bytes(content)
    keep_three = "trainer.max_ckpt_to_keep=3"  # or the run would be finished
    run_settings(settings_of(tiny_dir, folder, *LOCAL, keep_three))
    assert numbers(folder) == numbers(unbroken)
    assert "shards/0.safetensors has crc32 " in caplog.text
    assert "renamed to global_step_6.damaged" in caplog.text
    expected = ["global_step_4", "global_step_6", "global_step_6.damaged"]
    assert names_of_checkpoints(folder) == expected


def test_a_run_resumes_from_a_checkpoint_of_another_folder(
    unbroken: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    start_from = f"trainer.resume_from_path={unbroken}/global_step_4"
    path = ("trainer.resume_mode=resume_path", start_from, "trainer.save_freq=-1")
    unread = ("~trainer.max_ckpt_to_keep",)
    run_settings(settings_of(tiny_dir, tmp_path, *LOCAL, *path, *unread))
    assert numbers(tmp_path) == numbers(unbroken)[4:]


def test_a_checkpoint_of_another_model_is_rejected_before_anything_starts(
    unbroken: Path, tiny_dir: Path, tmp_path: Path, make_tiny: ModuleType
) -> None:
    make_tiny.make(tmp_path / "wide", num_train=1, num_val=1, hidden_size=32, num_layers=2)
    model = f"actor_rollout_ref.model.path={tmp_path}/wide/model"
    start = f"trainer.resume_from_path={unbroken}/global_step_4"
    path = "trainer.resume_mode=resume_path", start, "trainer.save_freq=-1"
    unread = "~trainer.max_ckpt_to_keep"
    with pytest.raises(
        CheckpointError, match=r"4.actor belongs to a different model: .*\[\d+, 64\] in the"
    ):
        run(load_config(settings_of(tiny_dir, tmp_path / "run", *LOCAL, *path, unread, model)))
    assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.long
@pytest.mark.ray
def test_a_killed_split_run_on_ray_resumes_bit_for_bit(
    unbroken: Path, tiny_dir: Path, tmp_path: Path, ray_session: None
) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    split = ("placement=split", "trainer.n_gpus_per_node=2", f"ray.address={address}")
    settings = settings_of(tiny_dir, tmp_path, *split, f"{ACTORS}.BackgroundActor")
    kill(start(settings), tmp_path, 3, 0.0)
    finish(start(settings))
    assert numbers(tmp_path) == numbers(unbroken)
    assert json.loads((tmp_path / "global_step_6" / "commit.json").read_text())["step"] == STEPS


def files_in_the_docs() -> tuple[set[str], set[str]]:
    """Return the files of a checkpoint and of a trained role, by docs/checkpoints.md."""
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (listing,) = re.findall(r"^```text\n.*?^  global_step_\d+/\n(.*?)^```", page, re.M | re.S)
    names_by_indent: dict[int, set[str]] = {4: set(), 6: set()}
    for line in listing.splitlines():
        names, meaning = line.strip().rsplit("  ", 1)
        if not meaning.startswith(("with LoRA", "with `hf_model`")):
            indent = len(line) - len(line.lstrip())
            names_by_indent[indent] |= {
                name.partition("/")[0] for name in names.replace(",", " ").split()
            }
    return names_by_indent[4], names_by_indent[6]


def test_a_checkpoint_holds_what_the_docs_list(unbroken: Path) -> None:
    in_step, in_role = files_in_the_docs()
    step = unbroken / f"global_step_{STEPS}"
    assert {path.name for path in step.iterdir()} == in_step
    for role in ("actor", "critic"):
        assert {path.name for path in (step / role).iterdir()} == in_role
