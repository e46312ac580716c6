"""Stages that all ranks of an engine go through together: an error of one is an error of all, with
its rank's name.

`engines/checkpoint` runs every stage of a save or a load by one of these.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from verl_like.errors import CheckpointError

CAUGHT = (OSError, RuntimeError, ValueError, LookupError, SafetensorError, CheckpointException)
"""What reading and writing files of tensors may raise; torch's writer gives RuntimeError for a full
disk.
"""


class Ranks:
    """The ranks of a process group, None being this rank alone; `what` begins every error."""

    def __init__(self, group: dist.ProcessGroup | None, what: str) -> None:
        self.group = group
        self.what = what
        self.mine = 0 if group is None else group.rank()
        self.count = 1 if group is None else group.size()

    def all_do(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank; the results in rank order."""
        result, problem = None, None
        try:
            result = work()
        except CAUGHT as error:
            problem = _describe(error, self.mine)
        if self.group is None:
            everyone = [(result, problem)]
        else:
            everyone = [(None, None)] * self.count
            try:
                dist.all_gather_object(everyone, (result, problem), group=self.group)
            except (RuntimeError, dist.DistError) as error:
                raise CheckpointError(
                    f"{self.what}: rank {self.mine} lost another rank: {error}"
                ) from error
        problems = {line: None for _, lines in everyone if lines for line in lines}
        if problems:
            raise CheckpointError(f"{self.what}: {'; '.join(problems)}.")
        return [result for result, _ in everyone]

    def first_does(self, work: Callable[[], None]) -> None:
        """Run `work` on rank 0."""
        self.all_do(work if self.mine == 0 else lambda: None)

    def share_files(
        self, folder: Path, fact: Callable[[Path], Any], names: list[str] | None = None
    ) -> dict[str, Any]:
        """`fact` of every file under `folder` (or of those named), each
        file being one rank's work.
        """
        if names is None:
            names = sorted(
                path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
            )
        mine = names[self.mine :: self.count]
        merged: dict[str, Any] = {}
        for facts in self.all_do(lambda: {name: fact(folder / name) for name in mine}):
            merged |= facts
        return merged


def _describe(error: BaseException, rank: int) -> list[str]:
    """A line for every rank that failed."""
    if isinstance(error, CheckpointException):
        return [
            line for other, (cause, _) in error.failures.items() for line in _describe(cause, other)
        ]
    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    return [f"rank {rank}: {kind}{str(error).splitlines()[0] if str(error) else ''}".rstrip(".")]
