"""How passes go through the layers that a rank has: here, all of them.

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
    metrics = layers.from_last(metrics)                     # what the last layers' rank knows
    """

    has_last = True
    """Whether this rank has the last layer, and so the model's outputs."""
    copies: frozenset[str] = frozenset()
    """Names of the weights here that count on another rank."""

    def forward(
        self,
        passes: Passes,
        micro_batches: MicroBatches,
        compute: Callable[[RowColumns, int], object],
        after: Callable[[int], None] | None = None,
    ) -> None:
        """Run forward passes; `compute` gets each micro-batch and the number of its real rows.

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
        """Add up the gradient of a weight that the first and the last rank have; none is so."""

    def of_all_ranks(self, own: Named, shapes: Named, on_all_ranks: bool) -> Named:
        """Yield the tensors of the ranks that have other layers, too: there are none."""
        return own


def backward(total: Tensor) -> None:
    """Add the gradients of a loss.

    A loss that is not finite has a gradient of NaN, also where its formula clamps.
    """
    total.backward(1 + (total - total).detach())  # type: ignore[no-untyped-call]
