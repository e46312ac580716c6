"""Run passes through the layers of a rank that has all layers.

`workers.training.parts.pipeline` has the same methods for a rank that has some of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from workers.training.microbatch import RowColumns

if TYPE_CHECKING:
    from workers.training.loss import Loss
    from workers.training.passes import Passes

MicroBatches = Sequence[tuple[RowColumns, int]]
Named = Iterator[tuple[str, Tensor]]


class AllLayers:
    """A rank with all layers: it runs passes one after the other.

    layers.train(passes, micro_batches, compute, loss)     # gradients add up
    metrics = layers.from_last(metrics)                     # from the rank with the last layer
    """

    has_last = True
    """True if this rank has the last layer and therefore the model's outputs."""
    copies: frozenset[str] = frozenset()
    """Names of weights on this rank that belong to another rank."""

    def forward(
        self,
        passes: Passes,
        micro_batches: MicroBatches,
        compute: Callable[[RowColumns, int], object],
        after: Callable[[int], None] | None = None,
    ) -> None:
        """Run forward passes; `compute` gets each micro-batch and its number of real rows.

        `after` gets that number after each pass, on ranks without the last layer, too.
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
        """Sum the gradient of a weight that the first and the last rank share: none here."""

    def of_all_ranks(self, tensors: Named, shapes: Named, on_all_ranks: bool) -> Named:
        """Yield the tensors of all stages; here, of this rank."""
        return tensors


def backward(total: Tensor) -> None:
    """Add the gradients of a loss.

    A non-finite loss has a gradient of NaN, even if its formula clamps.
    """
    total.backward(1 + (total - total).detach())  # type: ignore[no-untyped-call]
