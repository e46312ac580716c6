"""Repeat a mini-batch in smaller passes if the GPU of a rank runs out of memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from workers.training.loss import Loss
from workers.training.microbatch import MicroBatchBudget, MiniBatch, all_reduce
from workers.training.out_of_memory import can_repeat

if TYPE_CHECKING:
    from workers.training.engine import TrainEngine

logger = logging.getLogger(__name__)


def forward_backward_with_retry(
    engine: TrainEngine, batch: MiniBatch, budget: MicroBatchBudget, loss: Loss
) -> dict[str, Tensor]:
    """Run `engine.forward_backward` with this budget, or with a smaller one if memory runs out.

    Repeating the mini-batch computes the same gradients, as sums over more passes. The engine
    remembers which smaller budget fitted.
    """
    is_balanced = loss.is_balanced and engine.settings.router_aux_loss_coef > 0
    may_repeat = not is_balanced and can_repeat(engine, engine.has_gradients)
    while True:
        fitting = fitting_budget(engine, batch, budget)
        try:
            return engine.forward_backward(batch, fitting, loss)
        except torch.OutOfMemoryError as error:
            halved = fitting.halved() if may_repeat else None
            smaller = halved and halved.with_room(_longest(engine, batch))
            if smaller is None or smaller == fitting:
                raise
            message = str(error).partition(". ")[0]
        # outside the handler, the error is gone, and with it the frames that reference activations
        torch.cuda.empty_cache()
        logger.warning(
            "%s: the mini-batch is repeated in passes of %s instead of %s. To avoid the failed "
            "pass, set %s to this size.",
            message,
            smaller,
            fitting,
            fitting.keys,
        )
        engine.smaller_budgets[budget] = smaller


def fitting_budget(
    engine: TrainEngine, batch: MiniBatch, budget: MicroBatchBudget
) -> MicroBatchBudget:
    """Return this budget, or the smaller one that fitted after it ran out of memory."""
    smaller = engine.smaller_budgets.get(budget)
    return budget if smaller is None else smaller.with_room(_longest(engine, batch))


def _longest(engine: TrainEngine, batch: MiniBatch) -> int:
    """Return the number of tokens of the longest row of any rank, for which a budget has room."""
    lengths = engine.row_passes.lengths(engine.reading.reads(batch.columns))
    longest = torch.tensor(max(lengths, default=0))
    return int(all_reduce(longest, engine.groups.data, dist.ReduceOp.MAX))
