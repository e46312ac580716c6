"""What roles with a model in a training engine have in common, trained or frozen."""

from __future__ import annotations

from typing import Any

from verl_like.calls.dispatch import Dispatch, register
from verl_like.process.worker import Worker


class ModelWorker(Worker):
    """Loads the model of `self.engine`, and says which weights it has."""

    engine: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int = 0) -> None:
        """Load the model; with an optimizer its schedule spans so many calls of the update."""
        self.engine.build(self, total_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Hash of the full weights."""
        checksum: str = self.engine.weights_checksum()
        return checksum
