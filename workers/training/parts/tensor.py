"""Tensor parallelism (`parallel.tp`): matrices are split over the ranks of an axis."""

from __future__ import annotations

from workers.parallel import tensor as tensor_parallel
from workers.training.model import Model, Part


class MatrixSplit(Part):
    """Splits the module's matrices, and sums their partial gradients."""

    cut: tensor_parallel.Cut

    def change(self, model: Model) -> None:
        """Split the matrices."""
        tensor_parallel.check(model.module, model.dims.tp, "parallel.tp")
        self.cut = tensor_parallel.apply(model.module, model.groups.mesh["tp"])
        model.words = self.cut.words

    def sum_gradients(self) -> None:
        """Sum the gradients of weights that saw only some of the heads; once per step."""
        self.cut.add_up_gradients()
