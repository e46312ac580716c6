"""The calls of workers that save and load checkpoints: `save_checkpoint`, `load_checkpoint`.

`save_load.py` writes and reads the folders, `background_copies.py` writes files while training
continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import CheckpointError
from verl_like.process.worker import Worker
from workers.models.tensor_files import LEAST_BYTES

if TYPE_CHECKING:
    from workers.training.checkpoints.background_copies import FileCopies, Files
    from workers.training.engine import TrainEngine
    from workers.training.moving_average import WeightAverage


class BackgroundSaves(Worker):
    """A worker whose `save_checkpoint` passes its large files to `self.copies`."""

    background_from_bytes: ClassVar[int] = LEAST_BYTES
    """Smaller files are written immediately, while the caller waits."""
    copies: FileCopies | None = None
    """Copies files while `start_checkpoint` runs; None means that files are written immediately."""
    _own_copies: FileCopies | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_checkpoint(self, path: str, step: int = 0) -> bool:
        """Run `save_checkpoint`, but copy large files to host memory, to be written later.

        Return True if any file was copied.
        """
        if self._own_copies is None:
            from workers.training.checkpoints.background_copies import FileCopies

            self._own_copies = FileCopies(self.background_from_bytes)
        self._own_copies.begin(Path(path))
        self.copies = self._own_copies
        try:
            self.save_checkpoint(path, step)
        finally:
            self.copies = None
        return self._own_copies.has_files

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def write_checkpoint(self) -> Files:
        """Write the copied files, concurrently with other work."""
        assert self._own_copies is not None, "start_checkpoint comes first"
        try:
            return self._own_copies.write()
        except CheckpointError as error:
            raise CheckpointError(f"rank {self.rank}: {error}") from error

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def hurry_checkpoint(self, is_wanted: bool = True) -> None:
        """Write the rest at normal priority, or stop if the checkpoint is no longer wanted."""
        assert self._own_copies is not None, "start_checkpoint comes first"
        self._own_copies.hurry(is_wanted)


class CheckpointMixin(BackgroundSaves):
    """Adds saving and loading to a worker with a `TrainEngine`.

    Example:

        class Verifier(CheckpointMixin, Worker):
            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def init_model(self) -> None:
                self.engine.build(self)     # made in `__init__`; save_checkpoint writes its weights

    Attributes:
        engine: the `TrainEngine`, which the worker sets in `init_model`.
        config: the worker's config section, which has the key `checkpoint.save_contents`.
        average: a moving average of the weights that is saved with the weights, or None.
    """

    engine: TrainEngine
    config: Any
    average: WeightAverage | None = None
    """A moving average of the weights, saved with them."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, path: str, step: int = 0, contents: Sequence[str] | None = None
    ) -> None:
        """Write the folder `path`, whole or not at all; it replaces a folder of the same name.

        `step` is the number of the last step. `contents` overrides `checkpoint.save_contents`. If
        anything fails, an earlier folder stays unchanged. Files that `self.copies` takes are
        written later, into a folder that nobody reads yet.
        """
        from workers.training.checkpoints.save_load import save

        saved = self.config.checkpoint.save_contents if contents is None else contents
        save(self.engine, self.average, Path(path), step, saved, self.copies)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_model(self, path: str) -> None:
        """Write the model into the folder `path` for `from_pretrained`."""
        from workers.training.checkpoints.save_load import export

        export(self.engine, Path(path))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Load the folder `path`, written by any number of ranks.

        Raise if the folder is damaged or belongs to another model.
        """
        from workers.training.checkpoints.save_load import load

        load(self.engine, self.average, Path(path))
