"""Count and report steps with a non-finite gradient, which `guarded_step` skipped."""

from __future__ import annotations

import logging
import math

import torch.distributed as dist

from verl_like.errors import WorkerError
from workers.parallel.groups import Groups

MOST_IN_A_ROW = 5
"""Consecutive steps that are skipped; one more ends the run."""
logger = logging.getLogger(__name__)


class NonfiniteGuard:
    """Counts skipped steps, names their samples, and ends the run if too many come in a row.

    Both counts are stored in checkpoints.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.total = 0
        self.in_a_row = 0

    def note(self, grad_norm: float, names: list[str]) -> None:
        """Record the norm of a step over the samples `names` of this rank.

        Every rank calls it with the same norm.
        """
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return

        self.total += 1
        self.in_a_row += 1
        names_by_rank = [names]
        if (group := self.groups.data) is not None:
            names_by_rank = [[] for _ in range(group.size())]
            dist.all_gather_object(names_by_rank, names, group=group)
        samples = ", ".join(sorted(name for names_here in names_by_rank for name in names_here))

        fact = (
            f"the gradient's norm is {grad_norm}: step skipped. Samples of the mini-batch: "
            f"{samples}."
        )
        if self.in_a_row > MOST_IN_A_ROW:
            raise WorkerError(
                f"{self.in_a_row} steps in a row had a non-finite gradient; the last: {fact} Look "
                "at those samples' rewards and log-probs, lower optim.lr, or continue from an "
                "earlier checkpoint."
            )
        if self.groups.is_first:
            logger.warning("%s %d in a row, %d in all.", fact, self.in_a_row, self.total)
