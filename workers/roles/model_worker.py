"""What roles with a model in a training engine have in common, trained or frozen.

Their calls are dealt by the axes of the engine's ranks: the ranks of a model group get the same
rows, and one of them answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl_like.calls.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl_like.process.worker import Worker
from workers.parallel.sharding import dims_of

if TYPE_CHECKING:
    from workers.memory import EngineT, HeldModel

MESH = "train"
TRAIN = make_nd_compute_dataproto_dispatch_fn(MESH)
"""The dispatch mode of methods that run passes over rows."""


class ModelWorker(Worker):
    """Loads the model of `self.engine`, and says which weights it has."""

    engine: Any

    def engine_of(
        self, held: HeldModel, engine_class: Callable[..., EngineT], **settings: Any
    ) -> EngineT:
        """A training engine of the model that the role holds, by whose axes calls are dealt."""
        engine: Any = held.engine(engine_class, **settings)
        self.deal_by(engine)
        return engine

    def deal_by(self, engine: Any) -> None:
        """Deal the role's calls by the axes of this engine from now on."""
        dims = dims_of(self.world_size, engine.sharding)
        place = dims.data_rank(self.rank), dims.is_collect(self.rank)
        self._register_dispatch_collect_info(MESH, *place)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int = 0) -> None:
        """Load the model; with an optimizer its schedule spans so many calls of the update."""
        self.engine.build(self, total_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Hash of the full weights."""
        checksum: str = self.engine.weights_checksum()
        return checksum
