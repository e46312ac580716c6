"""The checkpoints of a run: commits, retention, search and errors."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.run_folder.checkpoints import Role, checkpoints, resume_from, saved
from trainer.run_folder import checkpoint
from trainer.run_folder.checkpoint import validation_score
from trainer.run_folder.folder import saved_steps
from trainer.run_folder.resume import TRACKIO_RUN, WANDB_ID
from verl_like.errors import CheckpointError, ConfigError


class FullDisk(Role):
    """Has room for half a file."""

    def save(self, path: str, step: int) -> None:
        super().save(path, step)
        raise OSError(errno.ENOSPC, "No space left on device", path)


def test_every_role_resumes_from_the_newest_committed_step(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 10)
    (tmp_path / "global_step_12").mkdir()  # never committed
    checkpoints(tmp_path).write(14, {"actor": Role(14)}, {"global_step": 14})
    roles = {"actor": Role(0), "critic": Role(0)}
    assert checkpoints(tmp_path).resume.load(roles) == {"global_step": 10}
    assert (roles["actor"].number, roles["critic"].number) == (10, -10)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"


def test_a_checkpoint_is_due_every_save_freq_steps_and_at_the_end(tmp_path: Path) -> None:
    every_two = checkpoints(tmp_path)
    assert [step for step in range(1, 8) if every_two.is_due(step, 7)] == [2, 4, 6, 7]
    only_last = checkpoints(tmp_path, "trainer.save_freq=0", "trainer.save_every_minutes=null")
    assert [step for step in range(1, 8) if only_last.is_due(step, 7)] == [7]
    assert only_last.is_enabled
    never = checkpoints(tmp_path, "trainer.save_freq=-1")
    assert not any(never.is_due(step, 7) for step in range(1, 8))


def test_a_checkpoint_is_due_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    by_time = checkpoints(tmp_path, "trainer.save_freq=-1", "trainer.save_every_minutes=2")
    now[0] = 119.0
    assert not by_time.is_due(3, 7)
    now[0] = 120.0
    assert by_time.is_due(3, 7)
    assert not by_time.is_due(3, 7, by_time=False)
    by_time.write(3, {}, {})
    by_time.commit()
    now[0] = 130.0
    assert not by_time.is_due(4, 7)
    assert by_time.is_due(7, 7)
    assert by_time.is_enabled
    off = checkpoints(tmp_path / "off", "trainer.save_freq=-1", "trainer.save_every_minutes=null")
    now[0] = 1e6
    assert not off.is_due(7, 7)
    assert not off.is_enabled


def test_two_checkpoints_and_the_best_one_are_kept(tmp_path: Path) -> None:
    scores = {2: 0.1, 4: 0.7, 6: 0.7, 8: 0.2, 10: 0.3}
    for step, score in scores.items():
        with (tmp_path / "metrics.jsonl").open("a") as lines:
            line = {"step": step, "val-core/a/acc/mean@1": score, "val-core/b/acc/mean@1": 0.5}
            lines.write(json.dumps(line) + "\n")
        saved(tmp_path, step)
    assert saved_steps(tmp_path) == [6, 8, 10]


def test_the_best_validation_has_the_lowest_loss_or_highest_score() -> None:
    lower, higher = {"val/loss": 0.5, "val/accuracy": 0.1}, {"val/loss": 0.6, "val/accuracy": 0.9}
    assert validation_score(lower) > validation_score(higher)
    accurate = {"val-core/rm/accuracy": 0.8, "val-core/rm/loss": 9.0}
    assert validation_score(accurate) == 0.8
    assert validation_score({"val-core/a": float("nan")}) == float("-inf")
    assert validation_score({"step": 3, "critic/score/mean": 1.0}) is None


def test_old_checkpoints_are_removed_only_after_a_commit(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 6, overrides=("trainer.max_ckpt_to_keep=2",))
    assert saved_steps(tmp_path) == [4, 6]
    with pytest.raises(CheckpointError):
        checkpoints(tmp_path, "trainer.max_ckpt_to_keep=1").write(8, {"actor": FullDisk(0)}, {})
    assert saved_steps(tmp_path) == [4, 6]
    names = sorted(path.name for path in tmp_path.glob("global_step*"))
    assert names == ["global_step_4", "global_step_6"]


def test_a_full_disk_raises_and_leaves_no_partial_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    inodes = r" and \d+ inodes" if os.statvfs(tmp_path).f_files else ""
    words = f"step 4 was not written: .*No space left.* MiB{inodes} are free .*global_step_2"
    with pytest.raises(CheckpointError, match=words):
        checkpoints(tmp_path).write(4, {"actor": Role(4), "critic": FullDisk(0)}, {})
    assert not list(tmp_path.glob("global_step_4*"))
    assert checkpoints(tmp_path).resume.start_step == 2

    class FullExport:
        def export_model(self, folder: str) -> None:
            Path(folder).mkdir()
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="^the final model was not written: .*No space left"):
        checkpoints(tmp_path).write_model(4, FullExport())
    assert not list(tmp_path.glob("model*"))


def test_only_another_placement_may_resume(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    placement = (
        "trainer.n_gpus_per_node=4",
        "placement=split",
        "critic.ppo_micro_batch_size_per_gpu=1",
        "trainer.backend=local",
    )
    assert checkpoints(tmp_path, *placement).resume.start_step == 2
    changed = ("actor_rollout_ref.actor.optim.lr=1e-5", "algorithm.lam=0.9")
    words = "actor.optim.lr was 1e-06, is 1e-05; algorithm.lam was 1.0, is 0.9"
    with pytest.raises(CheckpointError, match=words):
        checkpoints(tmp_path, *changed)
    start = resume_from(tmp_path / "global_step_2")
    assert checkpoints(tmp_path, *changed, *start).resume.start_step == 2


def test_the_advice_of_errors_works(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    disable = "trainer.resume_mode=disable"
    older = resume_from(tmp_path / "global_step_2")

    with pytest.raises(CheckpointError, match="Choose another .*, remove them, or set .*=auto"):
        checkpoints(tmp_path, disable)
    assert checkpoints(tmp_path / "another", disable).resume.start is None
    assert checkpoints(tmp_path, "trainer.resume_mode=auto").resume.start_step == 4

    words = "holds checkpoints of later steps: 4.*Move them away, or choose another trainer.default"
    with pytest.raises(CheckpointError, match=words):
        checkpoints(tmp_path, *older)
    another = checkpoints(tmp_path / "another", *older).resume
    assert (another.start_step, another.resumes_in_place) == (2, False)
    (tmp_path / "global_step_4").rename(tmp_path / "away")
    assert checkpoints(tmp_path, *older).resume.start_step == 2

    shutil.rmtree(tmp_path / "global_step_2")
    assert checkpoints(tmp_path, disable).resume.start is None


def test_a_missing_checkpoint_lists_its_neighbors(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    words = "there is no such folder. Committed ones next to it: global_step_2, global_step_4"
    with pytest.raises(CheckpointError, match=words):
        checkpoints(tmp_path, *resume_from(tmp_path / "global_step_3"))


def test_a_resume_removes_everything_after_the_committed_step(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    lines = [json.dumps({"step": step, "loss": 0.1 + 0.2}) for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 1')
    (tmp_path / "rollouts").mkdir()
    for step in (2, 3):
        (tmp_path / "batches" / str(step)).mkdir(parents=True)
    for step in range(1, 4):
        (tmp_path / "rollouts" / f"{step}.jsonl").touch()
    (tmp_path / "global_step_4.part").mkdir()
    (tmp_path / ".draft-12").touch()
    (tmp_path / WANDB_ID).write_text("abc")
    checkpoints(tmp_path).resume.discard_later_steps()
    assert (tmp_path / WANDB_ID).read_text() == "abc"
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines[:3]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["1.jsonl", "2.jsonl"]
    assert [path.name for path in (tmp_path / "batches").iterdir()] == ["2"]
    assert not (tmp_path / "global_step_4.part").exists()
    assert not (tmp_path / ".draft-12").exists()


def test_a_run_without_checkpoints_starts_with_empty_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    names = (WANDB_ID, TRACKIO_RUN)
    for name in names:
        (tmp_path / name).write_text("abc")
    checkpoints(tmp_path).resume.discard_later_steps()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert [name for name in names if (tmp_path / name).exists()] == []


def test_a_resume_by_path_needs_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Set trainer.resume_from_path to a global_step_N folder"):
        checkpoints(tmp_path, "trainer.resume_mode=resume_path")
