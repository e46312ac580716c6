"""Forward and backward passes of a model over the micro-batches of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from workers.parallel.fsdp import begin_pass
from workers.training.lm_head import DEFAULT, TokenOutputs
from workers.training.loss import Loss
from workers.training.microbatch import MicroBatches, RowColumns
from workers.training.readings import Reading

Named = Iterator[tuple[str, Tensor]]


class AllLayers:
    """Runs passes one after the other, on a rank that has all layers.

    `PipelineLayers` has the same methods for a rank that has some of the layers.

    Example:

        for outputs, columns, num_real, losses in layers.train(reading, micro_batches, loss):
            losses.append(...)                  # adds to the gradients
        metrics = layers.from_last(metrics)     # from the rank with the last layer
    """

    has_last = True
    """True if this rank has the last layer, and with it the model's outputs."""
    copies: frozenset[str] = frozenset()
    """Names of weights on this rank that are copies of another rank's weights."""

    def forward(
        self, reading: Reading, micro_batches: MicroBatches, wanted: TokenOutputs = DEFAULT
    ) -> Iterator[tuple[RowColumns, int]]:
        """Yield the outputs of each micro-batch, and its number of real rows."""
        for columns, num_real in micro_batches:
            yield reading.outputs(columns, wanted), num_real

    def train(
        self, reading: Reading, micro_batches: MicroBatches, loss: Loss
    ) -> Iterator[tuple[RowColumns, RowColumns, int, list[Tensor]]]:
        """Yield the outputs, the columns and the number of real rows of each micro-batch.

        The caller adds the micro-batch's loss to the yielded list; then its backward pass runs.
        """
        model, num_left = reading.model, len(micro_batches)
        for columns, num_real in micro_batches:
            losses: list[Tensor] = []
            yield reading.outputs(columns, loss.wanted), columns, num_real, losses
            num_left -= 1
            begin_pass(
                model.module, model.is_one_unit, num_left == 0, strategy=model.sharding.strategy
            )
            total = losses.pop()
            # the gradient of a non-finite loss is NaN, even if the formula clamps it
            total.backward(1 + (total - total).detach())

    def from_last(self, result: Any) -> Any:
        """Return the result of the rank with the last layer, on all ranks."""
        return result

    def sum_tied_gradients(self) -> None:
        """Do nothing: embeddings and head are on the same rank."""

    def of_all_ranks(self, tensors: Named, shapes: Named, on_all_ranks: bool) -> Named:
        """Yield the tensors of all stages; here, of this rank."""
        return tensors
