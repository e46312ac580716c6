"""Find the checkpoint to resume: the folder's newest undamaged one, or the one that the user names.

    resume = ResumePoint(config)          # rejects a folder that this run cannot resume
    resume.discard_later_steps()          # removes everything after the committed step
    state = resume.load(groups)           # None: there is nothing to resume

A checkpoint's marker has digests of inputs: data, model folders, and code of rewards with the
user's modules that it imports. If these contents have changed, `resume_mode=auto` rejects the run,
and `resume_mode=resume_path` warns.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.config.keys import NAMES_OF_A_RUN, flat_config, keys_that_differ, may_change_on_resume
from trainer.config.schema import RunConfig
from trainer.run_folder.folder import (
    folder_names,
    installed_versions,
    read_marker,
    reject_damaged,
    saved_steps,
)
from verl_like.calls.future import gather
from verl_like.errors import CheckpointError, DamagedCheckpointError, VerlLikeError
from verl_like.files import (
    DRAFT,
    is_remote,
    json_lines,
    json_objects,
    read_json_object,
    write_atomic,
)
from workers.config.conditions import may_read_images
from workers.config.model import IMAGE_BACKEND

IMAGES_BY = "the backend of transformers' image processors"
"""The entry of a marker's `inputs` with this backend, if a model of the run reads images."""
LATEST = "latest_checkpointed_iteration.txt"
MAX_COUNT = 2**53
"""The largest count that JSON numbers represent exactly."""
WANDB_ID = "wandb_run_id.txt"
"""The file with the id of the W&B run, which a resumed run continues."""
TRACKIO_RUN = "trackio_run.txt"
"""The file with the name of the trackio run, which a resumed run continues."""
IS_LAST = "is_last_step"
"""The key of the driver's state that marks the run's last step."""
STEP_SUBFOLDERS = ("rollouts", "validation", "batches")
"""Subfolders with one file or folder per step."""
logger = logging.getLogger(__name__)


class ResumePoint:
    """Checkpoint from which a run resumes, if there is one."""

    def __init__(self, config: RunConfig) -> None:
        """Find the checkpoint of `trainer.resume_mode`; reject one of another configuration."""
        self.trainer = config.trainer
        self.folder = Path(config.trainer.default_local_dir).resolve()
        self.schema = type(config)
        self.config = flat_config(config)
        self.damaged: dict[Path, str] = {}
        """Newer checkpoints of the folder that are damaged, and why."""
        self.start: Path | None = self._find()
        self.start_step = 0 if self.start is None else read_marker(self.start)["step"]

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Digests of files that affect the run's numbers, by `key: file`, and `IMAGES_BY`.

        Names of models and data sets on a hub have no digest.
        """
        digests = {}
        for key, value in self.config.items():
            if may_change_on_resume(self.schema, key):
                continue
            for where, name in _file_names(key, value):
                if is_remote(name):
                    from verl_like.remote_files import remote_version

                    digests[f"{where}: {name}"] = remote_version(name, where)
                    continue
                path = _path_of(name)
                if path is None:
                    continue
                digests[f"{where}: {name}"] = digest(path)
                if where.endswith("model.path") and may_read_images(name):
                    digests[IMAGES_BY] = IMAGE_BACKEND
                if path.suffix != ".py":
                    continue
                from trainer.config.user_modules import imported_files

                for file in imported_files(path):
                    imported = os.path.relpath(file, path.resolve().parent)
                    digests[f"{where}: {imported}, which {name} imports,"] = digest(file)
        return digests

    @property
    def resumes_in_place(self) -> bool:
        """True if the run resumes from its own folder, so that earlier metrics are kept."""
        return self.start is not None and self.start.parent == self.folder

    @property
    def finished_message(self) -> str:
        """A message if this run has already finished its last step, otherwise "".

        A run with a changed setting, such as its length, is not finished: it may have steps left.
        """
        if self.start is None or not self.resumes_in_place:
            return ""
        saved = read_marker(self.start)["config"]
        keys = self.config.keys() - set(NAMES_OF_A_RUN)
        if any(saved.get(key) != self.config[key] for key in keys):
            return ""
        try:
            state = read_json_object(self.start / "trainer.json")
        except (OSError, ValueError):
            return ""  # the resume reports the error
        if not state.get(IS_LAST):
            return ""
        return (
            f"{self.folder} holds this run, which ended with step {self.start_step}: "
            "nothing is left to do. For more steps, change "
            "trainer.total_training_steps, trainer.total_epochs or trainer.stop_at; for "
            "another run, choose another trainer.default_local_dir."
        )

    @contextmanager
    def naming_checkpoint(self) -> Iterator[None]:
        """Name the checkpoint in errors raised while the driver's state is loaded.

        No checkpoint is set aside, because the fault may be in a user's trainer.
        """
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, VerlLikeError) or self.start is None:
                raise
            raise CheckpointError(
                f"{self.start / 'trainer.json'} does not load: {type(error).__name__}: {error}. "
                "Resume from another checkpoint with trainer.resume_mode=resume_path "
                f"trainer.resume_from_path=...; next to it: "
                f"{folder_names(saved_steps(self.start.parent))}."
            ) from error

    def load(self, groups: Any) -> dict[str, Any] | None:
        """Load every role's state of the chosen checkpoint; return the driver's state, or None.

        If the checkpoint turns out to be damaged, `resume_mode=auto` loads the newest undamaged one
        before it.
        """
        while self.start is not None:
            try:
                return self._load(self.start, groups)
            except DamagedCheckpointError as error:
                if self.trainer.resume_mode != "auto":
                    raise DamagedCheckpointError(f"{error}. {self._instead()}") from error
                self.damaged[self.start] = str(error)
                self.start = self._newest_whole()
                assert self.start is not None, "_newest_whole raises if no checkpoint is intact"
                self.start_step = read_marker(self.start)["step"]
                self.discard_later_steps()
        return None

    def _load(self, start: Path, groups: Any) -> dict[str, Any]:
        """Load the roles and the random state; return the trainer's state, which is checked."""
        gather(*(groups[role].load_checkpoint.remote(str(start / role)) for role in groups))
        from verl_like.process.random_state import load_random_state

        load_random_state(start / "random.json")
        try:
            state = read_json_object(start / "trainer.json")
            # reject a state that no run can have written after that step
            if state.get("global_step", self.start_step) != self.start_step:
                raise ValueError(
                    f"global_step is {state['global_step']!r:.40}, not {self.start_step}"
                )
            for name, number in _numbers({key: state[key] for key in state.keys() - {"alarms"}}):
                if isinstance(number, float) and not math.isfinite(number):
                    raise ValueError(f"{name} is {number}")
                if name.startswith("num_") and not (
                    type(number) is int and 0 <= number < MAX_COUNT
                ):
                    raise ValueError(f"{name} is {number!r:.40}, not a count")
        except ValueError as error:
            raise DamagedCheckpointError(f"{start / 'trainer.json'} is damaged: {error}") from error
        print(f"resumed from {start}", flush=True)
        return state

    def discard_later_steps(self) -> None:
        """Remove what an earlier run left after the step from which this run resumes.

        This covers unfinished folders, metrics and samples: all of them if the run does not resume
        from its own folder. Damaged checkpoints are set aside.
        """
        for folder, why in self.damaged.items():
            if folder.is_dir():  # renamed, so that no resume uses it
                aside = folder.with_name(folder.name + ".damaged")
                shutil.rmtree(aside, ignore_errors=True)
                folder.replace(aside)
                logger.warning("%s: renamed to %s; resuming from %s.", why, aside.name, self.start)
                write_atomic(self.folder / LATEST, str(self.start_step))
        for pattern in ("global_step_*.part", "global_step_*.old", f"{DRAFT}*"):
            for leftover in self.folder.glob(pattern):
                if leftover.is_dir() and not leftover.is_symlink():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)
        last = self.start_step if self.resumes_in_place else -1
        if not self.resumes_in_place:
            for name in (WANDB_ID, TRACKIO_RUN):
                (self.folder / name).unlink(missing_ok=True)  # the run starts a new one there
        metrics = self.folder / "metrics.jsonl"
        if metrics.is_file():
            lines, steps = json_objects(metrics)[0], range(last + 1)
            write_atomic(metrics, json_lines(line for line in lines if line.get("step") in steps))
        for path in (path for kind in STEP_SUBFOLDERS for path in self.folder.glob(f"{kind}/*")):
            if path.stem.isdecimal() and int(path.stem) > last:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        _ = self.inputs  # computes the digests now, when the run reads the files

    def _find(self) -> Path | None:
        """Return the checkpoint of `trainer.resume_mode`; reject one of another configuration."""
        if self.trainer.resume_mode == "resume_path":
            return self._resume_path()
        steps = saved_steps(self.folder)
        if steps and self.trainer.resume_mode == "disable":
            raise CheckpointError(
                f"trainer.resume_mode=disable, but {self.folder} holds checkpoints of steps "
                f"{', '.join(map(str, steps))}. A later automatic resume would continue from one "
                "of these old checkpoints. Choose another trainer.default_local_dir, remove them, "
                "or set trainer.resume_mode=auto."
            )
        newest = self._newest_whole()
        differing = [] if newest is None else self._differing(newest)
        if differing:
            raise CheckpointError(
                f"{newest} was written with another configuration: {'; '.join(differing)}. Start "
                "in another trainer.default_local_dir, or resume anyway with "
                f"trainer.resume_mode=resume_path trainer.resume_from_path={newest}"
            )
        return newest

    def _newest_whole(self) -> Path | None:
        """Return the folder's newest checkpoint with all files; note newer ones as `damaged`."""
        steps = saved_steps(self.folder)
        for step in reversed(steps):
            if self._is_whole(step):
                return self.folder / f"global_step_{step}"
        if steps:
            raise DamagedCheckpointError(
                f"no checkpoint in {self.folder} is intact: {'; '.join(self.damaged.values())}. "
                f"Set another trainer.default_local_dir, or move {folder_names(steps)} away to "
                "start in this folder."
            )
        return None

    def _resume_path(self) -> Path:
        """Return the checkpoint `resume_from_path`; raise if it is damaged or newer ones exist."""
        assert self.trainer.resume_from_path is not None, (
            "the checks reject resume_mode=resume_path without a path"
        )
        start = Path(self.trainer.resume_from_path).resolve()
        try:
            reject_damaged(start)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{error}. {self._instead()}") from error
        step = read_marker(start)["step"]
        newer = [n for n in saved_steps(self.folder) if n > step and self._is_whole(n)]
        if newer:
            raise CheckpointError(
                f"resuming from step {step}, but {self.folder} holds checkpoints of later steps: "
                f"{', '.join(map(str, newer))}. The next automatic resume would continue from "
                "those checkpoints. Move them away, or choose another trainer.default_local_dir."
            )
        for line in self._differing(start):
            logger.warning(
                "resuming with a configuration that differs from the checkpoint's: %s", line
            )
        return start

    def _is_whole(self, step: int) -> bool:
        """Return whether the checkpoint of this step is undamaged; record a damaged one."""
        folder = self.folder / f"global_step_{step}"
        if folder not in self.damaged:
            try:
                reject_damaged(folder)
            except DamagedCheckpointError as error:
                self.damaged[folder] = str(error)
        return folder not in self.damaged

    def _differing(self, folder: Path) -> list[str]:
        """Describe changes to input files, and to keys that affect the results."""
        marker = read_marker(folder)
        saved, inputs, versions = marker["config"], marker["inputs"], marker["versions"]
        differing = keys_that_differ(self.schema, saved, self.config)
        for name, digest in self.inputs.items():
            before = inputs.get(name, digest)
            if before != digest and name == IMAGES_BY:
                differing.append(f"{name} was {before!r}, is {digest!r}, which has other pixels")
            elif before != digest:
                differing.append(f"{name} has other contents now")
        for name, version in installed_versions().items():
            if versions.get(name, version) != version:
                logger.warning(
                    "%s was written by %s %s, but %s is installed: numbers may differ.",
                    *(folder, name, versions[name], version),
                )
        return differing

    def _instead(self) -> str:
        """Advise what to do about a damaged checkpoint that the user named."""
        start = Path(self.trainer.resume_from_path or "").resolve()
        steps = [step for step in saved_steps(start.parent) if start.name != f"global_step_{step}"]
        if not steps:
            return "The folder has no other checkpoint: start a new run."
        if start.parent == self.folder:
            return (
                "Leave out trainer.resume_mode and trainer.resume_from_path, and the run resumes "
                f"from the newest complete checkpoint, {folder_names(steps[-1:])}."
            )
        return f"Choose another checkpoint; next to it are {folder_names(steps)}."


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield each number in a value, with its key."""
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)


NAMES_OF_FILES = re.compile(r"(^|.*_)(path|file|files)$")
"""Last words of keys whose values may be files, folders or modules."""
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
WHOLE_BYTES = 64 << 20
"""Files up to this size are read whole. Larger files (weights) are sampled in evenly spaced
blocks."""
NUM_BLOCKS = 16
BLOCK_BYTES = 1 << 20


def _file_names(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, name) for every string that may name a file, even in lists of sections."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _file_names(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _file_names(key, inner)
    elif isinstance(value, str) and value and NAMES_OF_FILES.match(key.rpartition(".")[2]):
        yield key, value


def _path_of(name: str) -> Path | None:
    """Return the file or folder of that name, or the file of that module, or None."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not MODULE.fullmatch(name):
        return None
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):  # the import itself reports the error
        return None
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def digest(path: Path) -> str:
    """Return a digest of a file, or of a folder's file names and contents.

    Names that start with `.` or `__` are left out.
    """
    hasher = hashlib.blake2b(digest_size=16)
    if path.is_file():
        _add(path, hasher)
        return hasher.hexdigest()
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        if file.is_file() and not any(part.startswith((".", "__")) for part in name.parts):
            hasher.update(f"{name.as_posix()}\0".encode(errors="surrogateescape"))
            _add(file, hasher)
    return hasher.hexdigest()


def _add(path: Path, to: Any) -> None:
    size = path.stat().st_size
    to.update(f"{size}\0".encode())
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            hashlib.file_digest(file, lambda: to)
            return
        for number in range(NUM_BLOCKS):
            file.seek(number * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1))
            to.update(file.read(BLOCK_BYTES))
