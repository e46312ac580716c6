"""Repeat a mini-batch in smaller passes if the GPU runs out of memory.

Only a rank that trains alone does this: other ranks would wait in the collectives of its passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from workers.training.microbatch import Budget

logger = logging.getLogger(__name__)


class SmallerPasses:
    """Remembers the budgets that did not fit, and the smaller ones that did."""

    def __init__(self) -> None:
        self._fitting: dict[Budget, Budget] = {}

    def run(
        self,
        train: Callable[[Budget], dict[str, Tensor]],
        budget: Budget,
        clear: Callable[[], None],
    ) -> dict[str, Tensor]:
        """Return the result of `train` with this budget, or with a smaller one that fits.

        `clear` drops the gradients of the passes that ran before the error. The gradients of the
        repeated mini-batch are the same sums over more passes.
        """
        while True:
            fitting = self._fitting.get(budget, budget)
            try:
                return train(fitting)
            except torch.OutOfMemoryError as error:
                smaller = fitting.halved()
                if smaller is None:
                    raise
                message = str(error).partition(". ")[0]
            # the error is gone, and with it the frames that hold the activations
            clear()
            torch.cuda.empty_cache()
            logger.warning(
                "%s: the mini-batch is repeated in passes of %s instead of %s. Set this size, or "
                "enable_gradient_checkpointing=true, to save the failed pass.",
                message,
                smaller,
                fitting,
            )
            self._fitting[budget] = smaller
