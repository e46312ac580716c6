"""The run folder (`trainer.default_local_dir`), and the files written when a run starts.

<run folder>/
  run.lock           the owner of the folder, while it runs              (`FolderLock`)
  config.yaml        the configuration, resolved            (`open_run_folder`)
  changes.jsonl      keys that a resumed run changed        (`open_run_folder`)
  starts.jsonl       commands, hosts, commits, versions     (`note_start`)
  inputs/            model, rows, rewards of a Python run   (trainer.api)
  placement.txt      the roles of every node                (trainer.groups.worker_groups)
  metrics.jsonl      a line per step                        (trainer.run_folder.tracking)
  wandb_run_id.txt   the W&B run, if there is one           (trainer.run_folder.tracking)
  trackio_run.txt    the trackio run, if there is one       (trainer.run_folder.tracking)
  timeline.json      the calls of every worker              (trainer.run_folder.timeline)
  restarts.jsonl     lost and replaced workers, if any      (trainer.recovery)
  logs/              a file for every role and rank         (verl_like)
  global_step_N/     checkpoints                            (trainer.run_folder.checkpoint)
  rollouts/N.jsonl   the samples of step N                  (a recipe with samples)
  batches/N/         the inputs of its stages, if saved     (trainer.observers.saved_batches)
  validation/N.jsonl samples of the validation after step N (a recipe with samples)
  model/             the trained model, after the last step (trainer.run_folder.checkpoint)
  report.html        the report of the run, at its end      (trainer.tools.report.page)
  failure.txt        the error or signal that ended it      (trainer.tools.report.page)

A checkpoint is committed by its marker `commit.json`, which covers all roles, and is written last
and read first. Reading it returns data of the expected form, or raises an error with the reason.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer.config.keys import (
    checked_yaml,
    config_hash,
    flat_config,
    flatten,
    in_yaml,
    keys_that_differ,
)
from trainer.config.schema import RunConfig, where_it_is_now
from verl_like.errors import CheckpointError, ConfigError, DamagedCheckpointError
from verl_like.files import (
    check_form,
    file_fault,
    fingerprint,
    json_line,
    make_private,
    read_json_object,
    write_atomic,
)
from verl_like.masking import mask_text, masked
from workers.training.checkpoints.manifest import MANIFEST, MARKER, reject_missing

logger = logging.getLogger(__name__)
CONFIG_FILE, CHANGES_FILE = "config.yaml", "changes.jsonl"
THREADS = "trainer.threads_per_process"
"""A key without which runs of earlier versions computed with one thread."""
PACKAGES = (
    "verl-like",
    "torch",
    "transformers",
    "ray",
    "vllm",
    "flash-attn-4",
    "flash-attn",
    "tensordict",
    "numpy",
)


def note_start(folder: Path, rows: int | None = None) -> None:
    """Add a line to `starts.jsonl`: when, where, by which command, code and packages.

    `rows` is the number of rows to train on, if it is known.
    """
    line = {  # orig_argv: a command's main removes words from argv
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "command": mask_text(shlex.join(sys.orig_argv)),
        "commit": commit_of_folder(),
        "rows": rows,
        "versions": {"python": platform.python_version(), **installed_versions()},
    }
    with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json_line(line))


GIT_S = 5.0
"""Maximum seconds for a question to git."""


def commit_of_folder() -> str:
    """Return the commit of the current folder, with a `+` if files differ; "" without git."""

    def git(*words: str) -> str:
        command = ["git", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=True)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return ""


@cache
def installed_versions() -> dict[str, str]:
    """Return the versions of the installed `PACKAGES`."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def saved_tree(folder: Path) -> Any:
    """Return the configuration that a run saved when it started."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            f"{folder} is not a run folder: it has no {CONFIG_FILE}. Use the "
            "trainer.default_local_dir of a run."
        )
    try:
        tree: Any = OmegaConf.create(checked_yaml(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as a run's configuration: {error}") from error
    section, _, name = THREADS.partition(".")
    if OmegaConf.is_dict(tree) and OmegaConf.is_dict(tree.get(section)):
        tree[section].setdefault(name, 1)
    return tree


def saved_config(folder: Path) -> dict[str, Any]:
    """Return the configuration that a run saved, as dotted key -> value."""
    return flatten(OmegaConf.to_container(saved_tree(folder)))


def open_run_folder(config: RunConfig, lock: FolderLock) -> Path:
    """Create the folder, for this user only, lock it and write `config.yaml` without secrets.

    An existing folder keeps its mode. Raise if it is not writable or, with `resume_mode=auto`, has
    another run's metrics and no checkpoint.
    """
    folder = Path(config.trainer.default_local_dir)
    _reject_other_run(folder, config)
    try:
        make_private(folder)
        lock.acquire()
        _note_changes(folder, config)
        tree = in_yaml(masked(asdict(config)))
        write_atomic(folder / CONFIG_FILE, f"# config hash {config_hash(config)}\n{tree}")
    except OSError as err:
        raise ConfigError(
            f"trainer.default_local_dir={folder} is not writable ({err}). Choose another folder."
        ) from err
    return folder


def _note_changes(folder: Path, config: RunConfig) -> None:
    """Add a line to `changes.jsonl` if a resumed run changes keys: the step, and the values."""
    if config.trainer.resume_mode == "disable" or not (folder / CONFIG_FILE).is_file():
        (folder / CHANGES_FILE).unlink(missing_ok=True)
        return
    before, now = saved_config(folder), flatten(masked(asdict(config)))
    keys = {
        key: [before[key], now[key]] for key in before if before[key] != now.get(key, before[key])
    }
    step = max(saved_steps(folder), default=0)
    if keys and step:
        with (folder / CHANGES_FILE).open("a", encoding="utf-8") as file:
            file.write(json_line({"step": step, "keys": keys}))


def has_metrics(folder: Path) -> bool:
    """Return whether the folder has metrics of a run, and its configuration."""
    metrics, saved = folder / "metrics.jsonl", folder / CONFIG_FILE
    return metrics.is_file() and metrics.stat().st_size > 0 and saved.is_file()


def _reject_other_run(folder: Path, config: RunConfig) -> None:
    """Raise if the folder has metrics of a run with another configuration.

    A folder with a checkpoint is checked by `trainer.run_folder.resume`.
    """
    if config.trainer.resume_mode != "auto" or not has_metrics(folder):
        return
    if any(folder.glob("global_step_*")):
        return
    before, now = saved_config(folder), flat_config(config)
    differs = keys_that_differ(type(config), before, now)
    if differs:
        rest = f"; and {len(differs) - 5} more" if len(differs) > 5 else ""
        raise ConfigError(
            f"trainer.default_local_dir={folder} holds the metrics of a run with another "
            f"configuration: {'; '.join(differs[:5])}{rest}. Choose another folder, or set "
            "trainer.resume_mode=disable to overwrite these metrics."
        )


REPORT_FILE = "report.html"
RESTARTS_FILE = "restarts.jsonl"
MODEL = "model"
"""Folder of the final trained model, in the run folder."""
STEP_FOLDER = r"global_step_(\d+)"
FORM: dict[str, type] = {"step": int, "config": dict, "inputs": dict, "versions": dict}


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the completed checkpoints in a run folder, in order."""
    matches = (
        re.fullmatch(STEP_FOLDER, path.parent.name)
        for path in folder.glob(f"global_step_*/{MARKER}")
    )
    return sorted(int(match[1]) for match in matches if match)


def folder_names(steps: list[int]) -> str:
    """Return the folder names of these steps as text for a message."""
    return ", ".join(f"global_step_{step}" for step in steps) or "none"


def describe_lost_steps(num_steps: int) -> str:
    """Describe how many finished steps a restart lost."""
    if num_steps == 0:
        return "no finished step is lost"
    return f"{num_steps} finished step{'s' * (num_steps > 1)} repeated"


def read_marker(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's commit marker."""
    path = folder / MARKER
    try:
        marker = read_json_object(path)
        check_form(marker, FORM)
        for key in marker["config"]:
            if key.startswith("role_workers."):
                marker["config"][key] = where_it_is_now(marker["config"][key])
        marker["config"].setdefault(THREADS, 1)
        marker["files"].pop(MARKER, None)  # older runs listed a copy of their start model's marker
        of_name = re.fullmatch(STEP_FOLDER, folder.name)
        if of_name and int(of_name[1]) != marker["step"]:
            raise ValueError(f"its step is {marker['step']}, but its folder is {folder.name}")
    except FileNotFoundError as error:
        problem = "there is no such folder"
        if folder.is_dir():
            problem = "it was never committed (no commit.json)"
        beside = folder_names(saved_steps(folder.parent))
        raise CheckpointError(
            f"{folder} is not a checkpoint: {problem}. Committed ones next to it: {beside}."
        ) from error
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    return marker


def marker_of_model(run: Path) -> dict[str, Any] | None:
    """Return the marker of a run's final model; None without one or if a checkpoint is newer."""
    if not (run / MODEL / MARKER).is_file():
        return None
    marker = read_marker(run / MODEL)
    return marker if marker["step"] >= max(saved_steps(run), default=0) else None


def reject_damaged(folder: Path) -> None:
    """Raise if a file of a checkpoint is missing or changed.

    Shards, which the ranks read later, are checked only by name and size.
    """
    for name, written in read_marker(folder)["files"].items():
        fault = file_fault(folder / name, written)
        if fault:
            raise DamagedCheckpointError(f"{folder / name} {fault}")
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        reject_missing(manifest.parent)


def write_marker(part: Path, step: int, config: dict[str, Any], inputs: dict[str, str]) -> None:
    """Mark the files in `part` as complete.

    The marker covers the driver's files and every role's top-level files. A role's manifest covers
    its deeper files.
    """
    paths = [path for path in sorted(part.glob("*")) + sorted(part.glob("*/*")) if path.is_file()]
    marker = {
        "step": step,
        "files": {path.relative_to(part).as_posix(): fingerprint(path) for path in paths},
        "config": config,
        "inputs": inputs,
        "versions": installed_versions(),
    }
    write_atomic(part / MARKER, json.dumps(marker, indent=1))


class FolderLock:
    """A lock that allows one run at a time in a run folder: `run.lock`, which names the owner.

        with FolderLock(folder) as lock:     # locks the folder if it exists
            ...
            lock.acquire()                   # once it exists

    The operating system releases the lock when its process ends, however it ends, so a new run
    takes over the folder of a killed run. If a file system has no locks, the run continues with a
    warning.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "run.lock"
        self._descriptor: int | None = None

    def __enter__(self) -> FolderLock:
        """Lock an existing folder; raise if another run uses it."""
        if self.path.parent.is_dir():
            self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock; the empty file stays, because another run may be opening it."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def acquire(self) -> None:
        """Lock an existing folder, unless this object holds the lock already."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                logger.warning(
                    "%s cannot be locked (%s). Do not start a second run in this folder.",
                    self.path,
                    error,
                )
                return
            raise ConfigError(
                f"trainer.default_local_dir={self.path.parent} is in use by {_owner(self.path)}. "
                "Wait for that run, end it, or choose another folder."
            ) from error

        self._descriptor = descriptor
        if os.fstat(descriptor).st_size:
            logger.info("%s is a stale lock of %s; taking it over", self.path, _owner(self.path))
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.ctime()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def _owner(path: Path) -> str:
    try:
        owner = read_json_object(path)
        return f"process {owner['pid']} on {owner['host']}, a run since {owner['since']}"
    except (OSError, ValueError, KeyError):
        return "another run, which has just started or ended"
