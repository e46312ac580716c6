"""The run's checkpoints: a folder per step, with one commit marker over all roles.

    <run folder>/
      latest_checkpointed_iteration.txt   number of the newest step, for people and for verl's tools
      global_step_N/
        commit.json                       sizes and checksums; written last, so it marks completion
        trainer.json, random.json         the driver's state and its random state
        actor/, critic/, rollout/, ...    one folder per role, written by `Worker.save_checkpoint`
      model/                              the trained model, after the last step, with a marker

The loop calls `Checkpoints` like this:

    checkpoints = Checkpoints(config)
    state = checkpoints.resume.load(groups)     # the state to resume: trainer.run_folder.resume
    if checkpoints.is_due(step, total_steps):
        checkpoints.write(step, groups, state)
    ...                                   # the step's metrics, before its checkpoint is committed
    checkpoints.commit()                  # at once, or when all files are written (async_save)
    ...
    checkpoints.finish()                  # the last one is committed
    checkpoints.close()                   # ends all writing, however the run ended
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.config.schema import RunConfig
from trainer.run_folder.folder import MODEL, folder_names, saved_steps, write_marker
from trainer.run_folder.resume import LATEST, ResumePoint
from verl_like.calls.deadlines import Deadlines
from verl_like.calls.future import gather
from verl_like.errors import CheckpointError, VerlLikeError, WorkerError
from verl_like.files import draft_path, json_objects, replace_folder, write_atomic
from workers.training.checkpoints.manifest import add_files

AFTER_LOSS_S = 10.0
"""Seconds to wait for a checkpoint after a worker is lost, because it may have been a writer."""
DROP_S = 5.0
"""Seconds that writers may take to receive a request to hurry, or to stop."""
POLL_S = 0.05
logger = logging.getLogger(__name__)


class Checkpoints:
    """Writes the checkpoints of one run folder."""

    def __init__(self, config: RunConfig) -> None:
        """Find the checkpoint to resume; `ResumePoint` rejects one that does not fit this run."""
        self.resume = ResumePoint(config)
        self.trainer, self.folder = config.trainer, self.resume.folder
        self._written: int | None = None
        """The step of the checkpoint that is not committed yet."""
        self._unwritten: dict[str, Any] = {}
        """Role -> group whose workers have copied their state and still have to write it."""
        self._writing: dict[str, Any] | None = None
        """The futures of the background writing."""
        self._committed: list[Path] = []
        """Folders committed since the last call of `commit`."""
        self.took_s = {"copy": 0.0, "write": 0.0, "commit": 0.0}
        """Seconds of each part of the last checkpoint."""
        self._longest_s = Deadlines.from_settings(config.timeouts).call_s
        self._began = self._saved_at = time.monotonic()

    def is_due(self, step: int, total_steps: int, by_time: bool = True) -> bool:
        """Return whether `trainer.save_freq` or `save_every_minutes` asks for a checkpoint now."""
        every = self.trainer.save_freq
        if (every > 0 and step % every == 0) or (every >= 0 and step == total_steps):
            return True
        minutes, now = self.trainer.save_every_minutes, time.monotonic()
        since = self._began if step == total_steps else self._saved_at
        return by_time and minutes is not None and now - since >= 60 * minutes

    @property
    def is_enabled(self) -> bool:
        """True if this run writes checkpoints; if so, it also writes one when it is stopped."""
        return self.trainer.save_freq >= 0 or self.trainer.save_every_minutes is not None

    def write(
        self,
        step: int,
        groups: Any,
        state: dict[str, Any],
        write_more: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Write a checkpoint's files: the state of all roles and `state`.

        `commit` completes it. The previous checkpoint is committed first. `write_more` adds files.
        """
        self.finish()
        began, part, roles = time.monotonic(), self._part(step), list(groups)
        save = "start_checkpoint" if self.trainer.async_save else "save_checkpoint"
        with self._naming_failures(f"the checkpoint of step {step}", part):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            saves = [getattr(groups[role], save).remote(str(part / role), step) for role in roles]
            left = zip(roles, gather(*saves), strict=True)
            self._unwritten = {role: groups[role] for role, ranks in left if any(ranks or ())}
            from verl_like.process.random_state import save_random_state

            save_random_state(part / "random.json")
            write_more(part)
            write_atomic(part / "trainer.json", json.dumps(state, indent=1))
        self._written = step
        self.took_s["copy"] = time.monotonic() - began

    def write_model(self, step: int, group: Any) -> Path:
        """Write the trained model of `group` to `model/` of the run folder."""
        folder = self.folder / MODEL
        part = draft_path(folder)
        with self._naming_failures("the final model", part):
            group.export_model(str(part))
            write_marker(part, step, self.resume.config, self.resume.inputs)
            replace_folder(part, folder)
        return folder

    def commit(self) -> list[Path]:
        """Move the finished checkpoint to `global_step_<step>`; return newly committed folders.

        If the workers still have to write files, this call starts the writing in the background,
        and a later call moves the folder or raises the workers' error. The returned folders are
        those committed since the last call.
        """
        if self._written is not None and self._writing is None:
            self._saved_at = time.monotonic()
            groups = self._unwritten.items()
            self._writing = {role: group.write_checkpoint.remote() for role, group in groups}
        if self._is_all_there:
            self.finish()
        committed, self._committed = self._committed, []
        return committed

    @property
    def _is_all_there(self) -> bool:
        return all(future.done() for future in (self._writing or {}).values())

    def finish(self) -> None:
        """Wait until the checkpoint is committed, or raise its error; remove old checkpoints."""
        step, writing = self._written, self._writing
        if step is None or writing is None:
            return
        if not self._is_all_there:
            self._hurry(is_wanted=True)
        self._written = self._writing = None
        folder, part = self.folder / f"global_step_{step}", self._part(step)
        with self._naming_failures(f"the checkpoint of step {step}", part):
            files_of = {role: future.get() for role, future in writing.items()}
            began = time.monotonic()
            for role, ranks in files_of.items():
                for files in ranks:
                    add_files(part / role, files)
            write_marker(part, step, self.resume.config, self.resume.inputs)
            replace_folder(part, folder)
            write_atomic(self.folder / LATEST, str(step))
            steps = saved_steps(self.folder)
            for old in steps_to_drop(self.folder, steps, self.trainer.max_ckpt_to_keep):
                # a half-deleted folder must never have a checkpoint's name
                aside = self.folder / f"global_step_{old}.old"
                (self.folder / f"global_step_{old}").replace(aside)
                shutil.rmtree(aside, ignore_errors=True)
        self._committed.append(folder)
        self.took_s["commit"] = time.monotonic() - began

    def _hurry(self, is_wanted: bool) -> None:
        """Tell the workers that write the checkpoint to hurry, or to stop if not `is_wanted`."""
        for group in self._unwritten.values():
            with suppress(VerlLikeError):  # a lost worker writes no files
                group.hurry_checkpoint.remote(is_wanted).get(timeout=DROP_S)

    def close(self) -> None:
        """End the writing of a checkpoint when the run ends by an error or a signal.

        The checkpoint is committed if possible: after a second signal, which ends the run at once,
        only if its files are complete already.
        """
        step, error = self._written, sys.exception()
        if step is None or self._writing is None:
            return
        seconds = self._longest_s if isinstance(error, Exception) else 0.0
        self._wait(AFTER_LOSS_S if isinstance(error, WorkerError) else seconds)
        try:
            if not self._is_all_there:
                self._hurry(is_wanted=False)
                self._wait(DROP_S)
                with self._naming_failures(f"the checkpoint of step {step}", self._part(step)):
                    raise CheckpointError("the run ended before the checkpoint was written.")
            self.finish()
        except VerlLikeError as failure:
            logger.warning("%s", failure)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._is_all_there and time.monotonic() < until:
            time.sleep(POLL_S)

    def _part(self, step: int) -> Path:
        return self.folder / f"global_step_{step}.part"

    @contextmanager
    def _naming_failures(self, name: str, part: Path) -> Iterator[None]:
        """Raise a `CheckpointError` if a write fails, and remove its unfinished folder."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            shutil.rmtree(part, ignore_errors=True)
            room = "0 MiB"
            if self.folder.exists():  # a disk with free bytes may have no inode for another file
                disk = os.statvfs(self.folder)
                files = f" and {disk.f_favail} inodes" if disk.f_files else ""
                room = f"{disk.f_bavail * disk.f_frsize / 2**20:.0f} MiB{files}"
            raise CheckpointError(
                f"{name} was not written: {str(error).rstrip('.')}. {room} are free in "
                f"{self.folder}; its committed checkpoints: "
                f"{folder_names(saved_steps(self.folder))}."
            ) from error


def steps_to_drop(folder: Path, steps: Sequence[int], keep: int | None) -> list[int]:
    """Return the steps of the checkpoints to delete, oldest first.

    The newest `keep` checkpoints stay, and so does the one with the best validation score (of
    equal scores, the latest).
    """
    if keep is None:
        return []
    # a long run has many other lines, which are not parsed
    lines, _ = json_objects(folder / "metrics.jsonl", '"val')
    scored = [(validation_score(line), line["step"]) for line in lines if line.get("step") in steps]
    best = max(((score, step) for score, step in scored if score is not None), default=(0, None))[1]
    return [step for step in steps[:-keep] if step != best]


def validation_score(line: Mapping[str, Any]) -> float | None:
    """Return one number for the validation in a line of metrics, or None; larger is better.

    It is the mean of `val-core/...` without losses, or minus the mean loss if there are only
    losses.
    """
    numbers = {name: x for name, x in line.items() if isinstance(x, int | float)}
    losses = [x for name, x in numbers.items() if name.startswith("val") and name.endswith("loss")]
    scored = [name for name in numbers if name.startswith("val-core/")]
    scores = [numbers[name] for name in scored if not name.endswith("loss")]
    if not scores and not losses:
        return None
    mean = sum(scores) / len(scores) if scores else -sum(losses) / len(losses)
    return mean if math.isfinite(mean) else -math.inf
