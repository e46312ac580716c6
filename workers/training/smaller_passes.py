"""Repeat a mini-batch in smaller passes if the GPU runs out of memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from workers.training.loss import Loss
from workers.training.microbatch import MicroBatchBudget, MiniBatch
from workers.training.parts.load_balancing import LoadBalancing

if TYPE_CHECKING:
    from workers.training.engine import TrainEngine

logger = logging.getLogger(__name__)


class SmallerPasses:
    """Repeats a mini-batch in smaller passes if the GPU runs out of memory.

    It remembers which smaller budget fitted in place of one that did not. Only a rank that trains
    alone repeats passes: other ranks would wait in the collectives of the repeated passes.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        self._fitting: dict[MicroBatchBudget, MicroBatchBudget] = {}

    def forward_backward(
        self, batch: MiniBatch, budget: MicroBatchBudget, loss: Loss
    ) -> dict[str, float]:
        """Run `engine.forward_backward` with this budget, or with a smaller one that fits.

        Repeating the mini-batch computes the same gradients, as sums over more passes.
        """
        engine = self.engine
        is_balanced = loss.is_balanced and engine.part(LoadBalancing) is not None
        if not engine.is_alone or is_balanced or engine.has_gradients:
            return engine.forward_backward(batch, budget, loss)
        while True:
            fitting = budget
            if budget in self._fitting:
                fitting = self._fitting[budget].with_room(self._longest(batch))
            try:
                return engine.forward_backward(batch, fitting, loss)
            except torch.OutOfMemoryError as error:
                halved = fitting.halved()
                smaller = halved and halved.with_room(self._longest(batch))
                if smaller is None or smaller == fitting:
                    raise
                message = str(error).partition(". ")[0]
            # outside the handler, the error is gone, and with it the frames that reference
            # activations
            torch.cuda.empty_cache()
            logger.warning(
                "%s: the mini-batch is repeated in passes of %s instead of %s. To avoid the failed "
                "pass, set %s to this size.",
                message,
                smaller,
                fitting,
                fitting.keys,
            )
            self._fitting[budget] = smaller

    def _longest(self, batch: MiniBatch) -> int:
        """Return the number of tokens of the longest row, for which every budget has room."""
        reads = self.engine.reading.reads(batch.columns)
        return max(self.engine.row_passes.lengths(reads), default=0)
