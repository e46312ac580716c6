"""Roles whose checkpoints are one file, and the checkpoints of such a run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer import load_config
from trainer.run_folder.checkpoint import Checkpoints
from verl_like.config_key import replace_keys


class Method:
    """A method of a role's group. It runs when it is called."""

    def __init__(self, function: Any) -> None:
        self.remote = lambda *args: SimpleNamespace(get=lambda timeout=None: function(*args))


class Role:
    """Writes its number into its folder and reads it back."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.start_checkpoint, self.load_checkpoint = Method(self.start), Method(self.load)

    def start(self, path: str, step: int) -> list[bool]:
        """Write everything at once, nothing in the background."""
        self.save(path, step)
        return [False]

    def save(self, path: str, step: int) -> None:
        Path(path).mkdir()
        (Path(path) / "number").write_text(str(self.number))

    def load(self, path: str) -> None:
        self.number = int((Path(path) / "number").read_text())


@cache
def composed_once(*overrides: str) -> Any:
    needed = ["data.train_files=x", "actor_rollout_ref.model.path=x", "trainer.save_freq=2"]
    return load_config([*needed, *overrides])


def composed(folder: Path, *overrides: str) -> Any:
    return replace_keys(composed_once(*overrides), {"trainer.default_local_dir": str(folder)})


def checkpoints(folder: Path, *overrides: str) -> Checkpoints:
    return Checkpoints(composed(folder, *overrides))


def saved(folder: Path, *steps: int, overrides: tuple[str, ...] = ()) -> None:
    for step in steps:
        run = checkpoints(folder, *overrides)
        run.write(step, {"actor": Role(step), "critic": Role(-step)}, {"global_step": step})
        run.commit()


def resume_from(folder: Path) -> tuple[str, str]:
    """Return the settings of a run that resumes from this checkpoint."""
    return "trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"
