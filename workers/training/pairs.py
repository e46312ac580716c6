"""Training engines for pairs of rows that a loss compares: the chosen one, and the rejected one.

A pair is one row of the batch, so that neither the dispatch nor a pass can part the two. Its
columns are [pairs, 2, T]; the engine runs [2 * pairs, T], and what it gives is [pairs, 2, ...].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_like.batch.ragged import Column, Ragged, join_ragged
from workers.training.engine import TrainEngine
from workers.training.microbatch import Budget, RowColumns, cut
from workers.training.score_engine import ScoreEngine

SIDES = ("chosen", "rejected")
"""What stands at 0 and 1 of a pair's second axis."""


class PairedRows(TrainEngine):
    """What an engine does otherwise where the rows of its batches are pairs."""

    def outputs(self, columns: RowColumns, *args: Any, **wanted: Any) -> RowColumns:
        """One forward pass over both sides: [pairs, 2, ...] columns.

        Where rows may not share a pass (`RowPasses.apart`), each side has one.
        """
        run = super().outputs
        found = [run(part, *args, **wanted) for part in self.parts(columns)]
        if len(found) == 1:
            return {name: column.unflatten(0, (-1, 2)) for name, column in found[0].items()}
        chosen, rejected = found
        return {name: _paired(chosen[name], rejected[name]) for name in chosen}

    def parts(self, columns: RowColumns) -> list[RowColumns]:
        """Rows of both sides, or each side's by itself."""
        sides = rows_of_pairs(columns)
        if not self.row_passes.apart:
            return [sides]
        places = [torch.arange(side, len(sides["input_ids"]), 2) for side in (0, 1)]
        return [{name: c.index_select(0, rows) for name, c in sides.items()} for rows in places]

    def reads(self, columns: RowColumns) -> Ragged:
        """For every token of both sides, whether it gets a head."""
        return super().reads(rows_of_pairs(columns))

    def _cut(self, columns: RowColumns, budget: Budget) -> list[list[int]]:
        """The pairs of every pass."""
        of_pairs = torch.tensor(self.row_passes.lengths(self.reads(columns))).view(-1, 2)
        are_padded = self.row_passes.kind == "padded"
        # padded, a pair takes as much as two of its longer side
        tokens = 2 * of_pairs.amax(dim=1) if are_padded else of_pairs.sum(dim=1)
        budget = self.row_passes.of_all_ranks(budget)
        cuts = cut(tokens.tolist(), budget, rectangles=are_padded, single=self.row_passes.apart)
        return self._for_stages(cuts, tokens.tolist(), budget)


class PairEngine(PairedRows):
    """Log-probs of both sides' responses: [pairs, 2, R]."""


class PairScoreEngine(PairedRows, ScoreEngine):
    """Scores of both sides: [pairs, 2]."""


def rows_of_pairs(columns: RowColumns) -> RowColumns:
    """[pairs, 2, T] columns as [2 * pairs, T], chosen and rejected in turn; others stay away."""
    return {name: c.flatten() for name, c in columns.items() if isinstance(c, Ragged)}


def _paired(chosen: Column, rejected: Column) -> Column:
    """[pairs, ...] columns as one [pairs, 2, ...]."""
    if isinstance(chosen, Tensor) and isinstance(rejected, Tensor):
        return torch.stack([chosen, rejected], dim=1)
    assert isinstance(chosen, Ragged), "both sides give one kind of column"
    assert isinstance(rejected, Ragged), "both sides give one kind of column"
    in_turn = torch.arange(2 * len(chosen)).view(2, -1).T.flatten()
    return join_ragged([chosen, rejected]).index_select(0, in_turn).unflatten(0, (-1, 2))
