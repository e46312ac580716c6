"""Tensor parallelism (`parallel.tp`): matrices are cut over the ranks of an axis."""

from __future__ import annotations

from workers.parallel import tensor as tensor_parallel
from workers.training.model import Model, Part


class CutMatrices(Part):
    """Cuts the module's matrices, and adds up what its ranks have parts of."""

    cut: tensor_parallel.Cut

    def change(self, model: Model) -> None:
        """Cut the matrices."""
        tensor_parallel.check(model.module, model.dims.tp, "parallel.tp")
        self.cut = tensor_parallel.apply(model.module, model.groups.mesh["tp"])
        model.words = self.cut.words

    def sum_gradients(self) -> None:
        """Add up the gradients of weights that saw a part of the heads; once per step."""
        self.cut.add_up_gradients()
