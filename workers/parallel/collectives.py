"""Stages that all ranks go through together: an error of one is an error of all, with its rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from verl_like.errors import CheckpointError

CAUGHT = (OSError, RuntimeError, ValueError, LookupError, SafetensorError, CheckpointException)
"""What reading and writing files of tensors may raise; a full disk is torch's RuntimeError."""


class Ranks:
    """The ranks of a process group, None being this rank alone; `what` begins every error."""

    def __init__(self, group: dist.ProcessGroup | None, what: str) -> None:
        self.group = group
        self.what = what
        self.mine = 0 if group is None else group.rank()
        self.count = 1 if group is None else group.size()

    def all_do(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank; the results in rank order."""
        result: Any = None
        problems: list[str] = []
        try:
            result = work()
        except CAUGHT as error:
            problems = _describe(error, self.mine)

        outcomes = self._gather((result, problems))
        by_text = {text: None for _, others in outcomes for text in others}  # each once, in order
        if by_text:
            raise CheckpointError(f"{self.what}: {'; '.join(by_text)}.")
        return [result for result, _ in outcomes]

    def _gather(self, outcome: tuple[Any, list[str]]) -> list[tuple[Any, list[str]]]:
        """Every rank's outcome, in rank order."""
        if self.group is None:
            return [outcome]
        outcomes: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(outcomes, outcome, group=self.group)
        except (RuntimeError, dist.DistError) as error:
            raise CheckpointError(
                f"{self.what}: rank {self.mine} lost another rank: {error}"
            ) from error
        return outcomes

    def first_does(self, work: Callable[[], None]) -> None:
        """Run `work` on rank 0."""
        self.all_do(work if self.mine == 0 else lambda: None)

    def share_files(
        self, folder: Path, fact: Callable[[Path], Any], names: list[str] | None = None
    ) -> dict[str, Any]:
        """`fact` of every file under `folder` (or of those named), one rank for each file."""
        if names is None:
            files = [path for path in folder.rglob("*") if path.is_file()]
            names = sorted(path.relative_to(folder).as_posix() for path in files)

        mine = names[self.mine :: self.count]
        merged: dict[str, Any] = {}
        for facts in self.all_do(lambda: {name: fact(folder / name) for name in mine}):
            merged |= facts
        return merged


def _describe(error: BaseException, rank: int) -> list[str]:
    """One text for every rank that failed."""
    if isinstance(error, CheckpointException):
        texts = []
        for other, (cause, _) in error.failures.items():
            texts += _describe(cause, other)
        return texts

    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    first_line = str(error).splitlines()[0] if str(error) else ""
    return [f"rank {rank}: {kind}{first_line}".rstrip(".")]
