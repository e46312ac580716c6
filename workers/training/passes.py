"""Forward and backward passes of a model over the micro-batches of a batch.

passes = Passes(model, reading)
columns = passes.forward(rows, budget, wanted)      # inside `model.running()`
shares = passes.train(mini_batch, budget, loss)     # gradients add up
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_like.batch.ragged import Column, rectangle_of
from workers.models.precision import computing_in
from workers.models.routing import COLUMN as ROUTED
from workers.parallel.fsdp import begin_pass
from workers.parallel.page_lock import to_device
from workers.training.lm_head import DEFAULT, Wanted
from workers.training.loss import Loss
from workers.training.microbatch import (
    Budget,
    MiniBatch,
    RowColumns,
    Rows,
    detached,
    micro_batches,
    spread,
)
from workers.training.packing import Feed
from workers.training.readings import TOKENS, Reading

if TYPE_CHECKING:
    from workers.training.model import Model

Cuts = list[list[int]]
"""The rows of every micro-batch."""
Pieces = dict[str, list[Column]]
"""Name -> one column of outputs per micro-batch."""


class Passes:
    """Splits rows into micro-batches and runs them through the model."""

    def __init__(self, model: Model, reading: Reading) -> None:
        self.model, self.reading = model, reading

    def forward(self, rows: Rows, budget: Budget, wanted: Wanted = DEFAULT) -> RowColumns:
        """Return the outputs for every row, without gradients."""
        pieces: Pieces = {}

        def compute(columns: RowColumns, num_real: int) -> None:
            for name, column in self.outputs(columns, wanted).items():
                pieces.setdefault(name, []).append(column[:num_real])

        cuts = self.cut(rows.columns, budget)
        self.run(rows.columns, cuts, compute)
        return self.restored(rows, pieces, cuts)

    def restored(self, rows: Rows, pieces: Pieces, cuts: Cuts) -> RowColumns:
        """Return the outputs of micro-batches in the order of the rows."""
        columns = {name: rows.restore(column, cuts) for name, column in pieces.items()}
        of_all: RowColumns = self.model.layers.from_last(columns)
        return of_all

    @torch.no_grad()
    def run(
        self,
        columns: RowColumns,
        cuts: Cuts,
        compute: Callable[[RowColumns, int], object],
        after: Callable[[int], None] | None = None,
    ) -> None:
        """Run forward passes without gradients, as `AllLayers.forward` does."""
        model = self.model
        batches = micro_batches(columns, cuts, model.groups.data, model.device)
        with computing_in(model.module, model.cast):
            model.layers.forward(self, batches, compute, after)

    def train(
        self, batch: MiniBatch, budget: Budget, loss: Loss, pieces: Pieces | None = None
    ) -> dict[str, Tensor]:
        """Run forward and backward passes; return this rank's shares of the metrics.

        The outputs of the passes are appended to `pieces`. Columns stay ragged up to the loss,
        whose signature is verl's: [rows, R]. Token ids, their mask and positions become rectangles
        only if the loss declares them.
        """
        totals: dict[str, Tensor] = {}
        names = ((batch.columns.keys() - {*TOKENS}) | {*loss.columns}) - {ROUTED}

        def compute(columns: RowColumns, num_real: int) -> Tensor:
            outputs = self.outputs(columns, loss.wanted)
            if pieces is not None:
                for name, column in outputs.items():
                    pieces.setdefault(name, []).append(detached(column[:num_real]))
            rectangles = {name: rectangle_of(column) for name, column in outputs.items()}
            inputs = {name: self._for_loss(columns[name]) for name in names}
            total, shares = loss.compute(rectangles, inputs, batch)
            for name, share in shares.items():
                if num_real:
                    share = share.detach().float()
                else:  # a dummy adds nothing
                    share = torch.zeros((), device=self.model.device)
                totals[name] = totals[name] + share if name in totals else share
            return total

        model, cuts = self.model, self.cut(batch.columns, budget)
        batches = micro_batches(batch.columns, cuts, model.groups.data, model.device)
        with computing_in(model.module, model.cast):
            model.layers.train(self, batches, compute, loss)
        return totals

    def outputs(self, columns: RowColumns, wanted: Wanted = DEFAULT) -> RowColumns:
        """Return the outputs of one forward pass over a micro-batch."""
        return self.reading.outputs(self.model, columns, wanted)

    def cut(self, columns: RowColumns, budget: Budget) -> Cuts:
        """Return the rows of every micro-batch."""
        cuts, lengths = self.reading.cut(self.model, columns, budget)
        # by tokens, at least as many micro-batches as stages, so that all stages have work
        return cuts if budget.tokens is None else spread(cuts, lengths, self.model.dims.pp)

    def feeds(self, columns: RowColumns) -> list[Feed]:
        """Return the arguments of every forward pass over a micro-batch."""
        return self.reading.feeds(self.model, columns)

    def begin_backward(self, is_last: bool, waits: bool = False) -> None:
        """Prepare a backward pass; `is_last` marks the last one of a mini-batch.

        `waits` is True if other forward passes wait for their backward passes.
        """
        model = self.model
        if model.is_sharded:
            begin_pass(
                model.module,
                model.is_one_unit,
                is_last,
                strategy=model.sharding.strategy,
                waits=waits,
            )

    def _for_loss(self, column: Column) -> Tensor:
        values = to_device(rectangle_of(column), self.model.device)
        # infinity becomes NaN, which formulas do not clamp: the step is skipped
        if values.is_floating_point():
            values = values.masked_fill(values.isinf(), torch.nan)
        return values
