"""A matrix that can no longer be read, checked by what it computes.

    product = Product(weight)                      # before it is packed for a kernel
    found = layer(probes(num_inputs, dtype))       # afterwards
    wrong = product.wrong_rows(found)

A few fixed random vectors go through the layer. Every number of them is between 1 and 2 or between
-2 and -1, so an element of the weight that is off by d puts each output of its row off by at least
d, and columns do not change places unnoticed. What hides a change is rounding: that of the sum, and
that of the output's type, of which there is least where an output is near zero. `packed` calls
this.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

NUM_PROBES = 16
"""Where outputs are rounded to fewer bits than float32 has: one of so many is near zero."""
NUM_PROBES_FLOAT32 = 4
CHUNK = 2**20
"""Elements of a weight that are taken into float32 at a time."""
SUM_ERROR = 16 * 2.0**-24
"""Bound on the rounding of a float32 sum of n products, over sqrt(n) and the norm of its row.

Random signs make partial sums walk at random: the error's standard deviation is 0.6 * 2**-24 in
these units where one number is added after the other, and less where kernels add in blocks."""


@lru_cache(maxsize=64)
def probes(num_inputs: int, dtype: torch.dtype) -> Tensor:
    """[probes, inputs]; the same in every process, and the same numbers in every type."""
    generator = torch.Generator().manual_seed(num_inputs)
    shape = NUM_PROBES_FLOAT32 if dtype is torch.float32 else NUM_PROBES, num_inputs
    sizes = torch.randint(128, 256, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (sizes * signs / 128).to(dtype)


class Product:
    """What a layer gives for the probes if it has this weight [rows, inputs], on the CPU."""

    def __init__(self, weight: Tensor) -> None:
        """`outputs` and `rounding`, how far that can move them, are [probes, rows]."""
        num_inputs = weight.shape[1]
        inputs = probes(num_inputs, weight.dtype).float().t()
        outputs, norms = [], []
        for chunk in weight.detach().split(max(1, CHUNK // num_inputs)):
            numbers = chunk.float()
            outputs.append(numbers @ inputs)
            norms.append(torch.linalg.vector_norm(numbers, dim=1))

        self.outputs = torch.cat(outputs).t()
        limits = torch.finfo(weight.dtype)
        of_type = self.outputs.abs() * (0.505 * limits.eps) + limits.smallest_normal * limits.eps
        self.rounding = of_type.add_(torch.cat(norms), alpha=SUM_ERROR * num_inputs**0.5)

    def wrong_rows(self, found: Tensor) -> Tensor | None:
        """[rows]: whether a layer that gave `found` has another weight there; None if nowhere."""
        near = (found.float() - self.outputs).abs_() <= self.rounding
        if near.all():
            return None
        # a weight may have come with NaN, and outputs may be too large for their type
        both_broken = ~(found.isfinite() | self.outputs.to(found.dtype).isfinite())
        wrong = ~(near | both_broken).all(0)
        return wrong if wrong.any() else None
