"""Training engines for pairs of rows that a loss compares: the chosen one, and the rejected one.

A pair is one row of the batch, so that neither the dispatch nor a pass can part the two. Its
columns are [pairs, 2, T]; the engine runs [2 * pairs, T], and what it gives is [pairs, 2, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from workers.training.engine import TrainEngine
from workers.training.microbatch import Budget, Columns, Rows, cut
from workers.training.packing import check_rows
from workers.training.score_engine import ScoreEngine

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

SIDES = ("chosen", "rejected")
"""What stands at 0 and 1 of a pair's second axis."""


class PairedRows(TrainEngine):
    """What an engine does otherwise where the rows of its batches are pairs."""

    def outputs(self, columns: Columns, *args: Any, **wanted: Any) -> Columns:
        """One forward pass over both sides: [pairs, 2, ...] columns.

        Where rows may not share a pass (`RowPasses.apart`), each side has one.
        """
        sides = rows_of_pairs(columns)
        parts = [sides]
        if self.row_passes.apart:
            parts = [{name: column[side::2] for name, column in sides.items()} for side in (0, 1)]

        run = super().outputs
        found = [run(part, *args, **wanted) for part in parts]
        if len(found) == 1:
            return {name: column.unflatten(0, (-1, 2)) for name, column in found[0].items()}
        chosen, rejected = found
        return {name: torch.stack([chosen[name], rejected[name]], dim=1) for name in chosen}

    def _take(self, data: DataProto, names: Sequence[str]) -> Rows:
        rows = Rows.take(data, names, self.world_size)
        sides = [f"{name} ({side})" for name in rows.names for side in SIDES]
        check_rows(self.module, rows_of_pairs(rows.columns), sides)
        return rows

    def _cut(self, columns: Columns, budget: Budget) -> list[list[int]]:
        """The pairs of every pass."""
        sides = rows_of_pairs(columns)
        lengths = self.row_passes.lengths(sides, self.reads(sides))
        of_pairs = torch.tensor(lengths).view(-1, 2)
        are_padded = self.row_passes.kind == "padded"
        # padded, a pair takes as much as two of its longer side
        tokens = 2 * of_pairs.amax(dim=1) if are_padded else of_pairs.sum(dim=1)
        return cut(tokens.tolist(), budget, rectangles=are_padded, single=self.row_passes.apart)


class PairEngine(PairedRows):
    """Log-probs of both sides' responses: [pairs, 2, R]."""


class PairScoreEngine(PairedRows, ScoreEngine):
    """Scores of both sides: [pairs, 2]."""


def rows_of_pairs(columns: Columns) -> Columns:
    """[pairs, 2, T] columns as [2 * pairs, T], chosen and rejected in turn; others stay away."""
    return {name: column.flatten(0, 1) for name, column in columns.items() if column.dim() == 3}
