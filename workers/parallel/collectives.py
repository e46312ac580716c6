"""Run file work on all ranks together: an error on one rank is raised on all, naming that rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError

from verl_like.errors import CheckpointError, DamagedCheckpointError

CAUGHT = (OSError, RuntimeError, ValueError, LookupError, TypeError, SafetensorError)
"""Errors that reading and writing files of tensors may raise."""


class Ranks:
    """The ranks of a process group (None: only this rank).

    An error of `CAUGHT` on any rank is raised on all ranks, as a `CheckpointError` that begins with
    `subject`.
    """

    def __init__(self, group: dist.ProcessGroup | None, subject: str) -> None:
        self.group = group
        self.subject = subject
        self.mine = 0 if group is None else group.rank()
        self.count = 1 if group is None else group.size()

    def run_on_all(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank; return the results in rank order."""
        result: Any = None
        problem: tuple[str, bool] | None = None
        try:
            result = work()
        except CAUGHT as error:
            name = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            first_line = str(error).splitlines()[0] if str(error) else ""
            text = f"rank {self.mine}: {name}{first_line}".rstrip(".")
            problem = text, isinstance(error, DamagedCheckpointError)

        outcomes: list[Any] = [(result, problem)]
        if self.group is not None:
            outcomes *= self.count
            try:
                dist.all_gather_object(outcomes, (result, problem), group=self.group)
            except (RuntimeError, dist.DistError) as error:
                raise CheckpointError(
                    f"{self.subject}: rank {self.mine} lost another rank: {error}"
                ) from error
        problems = [problem for _, problem in outcomes if problem is not None]
        if problems:
            is_damage = any(damaged for _, damaged in problems)
            kind = DamagedCheckpointError if is_damage else CheckpointError
            raise kind(f"{self.subject}: {'; '.join(text for text, _ in problems)}.")
        return [result for result, _ in outcomes]

    def run_on_first(self, work: Callable[[], None]) -> None:
        """Run `work` on rank 0; every rank must call this."""
        self.run_on_all(work if self.mine == 0 else lambda: None)

    def share_files(
        self, folder: Path, fact: Callable[[Path], Any], names: list[str] | None = None
    ) -> dict[str, Any]:
        """Return `fact` of every file under `folder` (or of `names`), each computed by one rank."""
        if names is None:
            files = [path for path in folder.rglob("*") if path.is_file()]
            names = sorted(path.relative_to(folder).as_posix() for path in files)

        mine = names[self.mine :: self.count]
        merged: dict[str, Any] = {}
        for results in self.run_on_all(lambda: {name: fact(folder / name) for name in mine}):
            merged |= results
        return merged
