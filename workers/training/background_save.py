"""A role whose checkpoint is written while its worker goes on: `trainer.async_save`.

The driver calls, on every rank:

    start_checkpoint(path, step)     # in its turn: copies; training goes on
    write_checkpoint()               # past the queue, beside the steps: writes
    hurry_checkpoint(is_wanted)      # past the queue: somebody waits for it, or wants it no more
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import CheckpointError
from verl_like.process.worker import Worker
from workers.training.file_copies import LEAST_BYTES, FileCopies, Files


class SavesInBackground(Worker):
    """Adds it to a worker whose `save_checkpoint` writes its large files by `self.copies`."""

    background_from_bytes: ClassVar[int] = LEAST_BYTES
    """A rank with less to write does so while it is waited for."""
    copies: FileCopies | None = None
    """Takes large files while `start_checkpoint` runs; None: they are written at once."""
    _own_copies: FileCopies | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_checkpoint(self, path: str, step: int = 0) -> bool:
        """`save_checkpoint`, but large files are copied; gives whether any is left to write."""
        if self._own_copies is None:
            self._own_copies = FileCopies(self.background_from_bytes)
        self._own_copies.begin(Path(path))
        self.copies = self._own_copies
        try:
            self.save_checkpoint(path, step)
        finally:
            self.copies = None
        return self._own_copies.are_there

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def write_checkpoint(self) -> Files:
        """Write what was copied, beside whatever is being computed."""
        assert self._own_copies is not None, "start_checkpoint comes first"
        try:
            return self._own_copies.write()
        except CheckpointError as error:
            raise CheckpointError(f"rank {self.rank}: {error}") from error

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def hurry_checkpoint(self, is_wanted: bool = True) -> None:
        """Write the rest as fast as it goes, or nothing more if it is wanted no longer."""
        assert self._own_copies is not None, "start_checkpoint comes first"
        if is_wanted:
            self._own_copies.hurry()
        else:
            self._own_copies.drop()
