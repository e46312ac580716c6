"""Forward and backward passes of a model over the micro-batches of a batch.

Example:

    passes = Passes(model, reading)
    columns = passes.forward(rows, budget, wanted)      # inside `model.running()`
    totals = passes.train(mini_batch, budget, loss)     # adds to the gradients
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_like.batch.ragged import Column, rectangle_of
from workers.models.precision import computing_in
from workers.models.routing import COLUMN as ROUTED
from workers.parallel.fsdp import begin_pass
from workers.parallel.offload import to_device
from workers.training.lm_head import DEFAULT, TokenOutputs
from workers.training.loss import Loss
from workers.training.microbatch import (
    MicroBatchBudget,
    MiniBatch,
    RowColumns,
    Rows,
    detached,
    micro_batches,
    spread,
)
from workers.training.readings import TOKENS, Reading

if TYPE_CHECKING:
    from workers.training.model import Model


Cuts = list[list[int]]
"""The rows of every micro-batch."""
PassOutputs = dict[str, list[Column]]
"""Name -> one column of outputs per micro-batch."""


class Passes:
    """Splits rows into micro-batches and runs them through the model."""

    def __init__(self, model: Model, reading: Reading) -> None:
        self.model, self.reading = model, reading

    def forward(
        self, rows: Rows, budget: MicroBatchBudget, wanted: TokenOutputs = DEFAULT
    ) -> RowColumns:
        """Return the outputs for every row, without gradients."""
        pass_outputs: PassOutputs = {}

        def compute(columns: RowColumns, num_real: int) -> None:
            for name, column in self.reading.outputs(columns, wanted).items():
                pass_outputs.setdefault(name, []).append(column[:num_real])

        cuts = self.cut(rows.columns, budget)
        self.run(rows.columns, cuts, compute)
        return self.restored(rows, pass_outputs, cuts)

    def restored(self, rows: Rows, pass_outputs: PassOutputs, cuts: Cuts) -> RowColumns:
        """Return the outputs of micro-batches in the order of the rows."""
        columns = {name: rows.restore(column, cuts) for name, column in pass_outputs.items()}
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
        self,
        batch: MiniBatch,
        budget: MicroBatchBudget,
        loss: Loss,
        pass_outputs: PassOutputs | None = None,
    ) -> dict[str, Tensor]:
        """Run forward and backward passes; return this rank's contributions to the metrics.

        The outputs of the passes are appended to `pass_outputs`. Columns stay ragged until they
        reach the loss, whose arguments are padded [rows, R] as in verl. Token ids, their mask and
        their positions are padded only if the loss declares them.
        """
        totals: dict[str, Tensor] = {}
        names = ((batch.columns.keys() - {*TOKENS}) | {*loss.columns}) - {ROUTED}

        def compute(columns: RowColumns, num_real: int) -> Tensor:
            outputs = self.reading.outputs(columns, loss.wanted)
            if pass_outputs is not None:
                for name, column in outputs.items():
                    pass_outputs.setdefault(name, []).append(detached(column[:num_real]))
            rectangles = {name: rectangle_of(column) for name, column in outputs.items()}
            inputs = {n: to_device(rectangle_of(columns[n]), self.model.device) for n in names}
            for name, values in inputs.items():
                # infinity becomes NaN, which no formula clamps, so the step will be skipped
                if values.is_floating_point():
                    inputs[name] = values.masked_fill(values.isinf(), torch.nan)
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

    def cut(self, columns: RowColumns, budget: MicroBatchBudget) -> Cuts:
        """Return the rows of every micro-batch."""
        cuts, lengths = self.reading.cut(columns, budget)
        # with a token budget, at least as many micro-batches as stages, so that all stages have
        # work
        return cuts if budget.tokens is None else spread(cuts, lengths, self.model.dims.pp)

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


MicroBatches = Sequence[tuple[RowColumns, int]]
Named = Iterator[tuple[str, Tensor]]


class AllLayers:
    """Runs passes one after the other, on a rank that has all layers.

    `PipelineLayers` has the same methods for a rank that has some of the layers.

    Example:

        layers.train(passes, micro_batches, compute, loss)     # adds to the gradients
        metrics = layers.from_last(metrics)                     # from the rank with the last layer
    """

    has_last = True
    """True if this rank has the last layer, and with it the model's outputs."""
    copies: frozenset[str] = frozenset()
    """Names of weights on this rank that are copies of another rank's weights."""

    def forward(
        self,
        passes: Passes,
        micro_batches: MicroBatches,
        compute: Callable[[RowColumns, int], object],
        after: Callable[[int], None] | None = None,
    ) -> None:
        """Run forward passes. `compute` gets each micro-batch and its number of real rows.

        `after` is called with that number after each pass, also on ranks without the last layer.
        """
        for columns, num_real in micro_batches:
            compute(columns, num_real)
            if after is not None:
                after(num_real)

    def train(
        self,
        passes: Passes,
        micro_batches: MicroBatches,
        compute: Callable[[RowColumns, int], Tensor],
        loss: Loss,
    ) -> None:
        """Run a forward and a backward pass for each micro-batch; `compute` returns its loss."""
        num_left = len(micro_batches)
        for columns, num_real in micro_batches:
            total = compute(columns, num_real)
            num_left -= 1
            passes.begin_backward(is_last=num_left == 0)
            backward(total)

    def from_last(self, result: Any) -> Any:
        """Return the result of the rank with the last layer, on all ranks."""
        return result

    def sum_tied_gradients(self) -> None:
        """Do nothing: embeddings and head are on the same rank."""

    def of_all_ranks(self, tensors: Named, shapes: Named, on_all_ranks: bool) -> Named:
        """Yield the tensors of all stages; here, of this rank."""
        return tensors


def backward(total: Tensor) -> None:
    """Add the gradients of a loss.

    The gradient of a non-finite loss is NaN, even if the formula clamps it.
    """
    total.backward(1 + (total - total).detach())


logger = logging.getLogger(__name__)


class SmallerPasses:
    """Repeats a mini-batch in smaller passes if the GPU runs out of memory.

    It remembers which smaller budget fitted in place of one that did not. Only a rank that trains
    alone uses it: other ranks would wait in the collectives of the repeated passes.
    """

    def __init__(self) -> None:
        self._fitting: dict[MicroBatchBudget, MicroBatchBudget] = {}

    def run(
        self,
        train: Callable[[MicroBatchBudget], dict[str, Tensor]],
        budget: MicroBatchBudget,
        clear: Callable[[], None],
        longest: Callable[[], int],
    ) -> dict[str, Tensor]:
        """Return the result of `train` with this budget, or with a smaller one that fits.

        `clear` drops the gradients of the passes that ran before the error. `longest` returns the
        number of tokens of the longest row, for which every budget has room. Repeating the
        mini-batch computes the same gradients, as sums over more passes.
        """
        while True:
            fitting = budget
            if budget in self._fitting:
                fitting = self._fitting[budget].with_room(longest())
            try:
                return train(fitting)
            except torch.OutOfMemoryError as error:
                halved = fitting.halved()
                smaller = halved and halved.with_room(longest())
                if smaller is None or smaller == fitting:
                    raise
                message = str(error).partition(". ")[0]
            # outside the handler, the error is gone, and with it the frames that reference
            # activations
            clear()
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
