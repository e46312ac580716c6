"""A low-rank adapter and its base weight, which together form one weight.

They are merged where the adapter is trained, and in a rollout that receives base and factors
separately.
"""

from __future__ import annotations

from torch import Tensor

PARTS = ("weight", "lora_A", "lora_B")
"""Names of the tensors of an adapted layer: the base weight and two factors, `layer.<part>`."""


def merged_weight(base: Tensor, a: Tensor, b: Tensor, scaling: float, transposed: bool) -> Tensor:
    """Return base + scaling * b @ a in float32; `transposed` if the base is [in, out]."""
    delta = scaling * (b.float() @ a.float())
    return base.float() + (delta.T if transposed else delta)


def shapes_differ(base: Tensor, a: Tensor, b: Tensor, transposed: bool) -> bool:
    """True if the shapes of base and factors do not fit together."""
    out_by_in = base.shape[::-1] if transposed else base.shape
    return (b.shape[0], a.shape[1]) != tuple(out_by_in) or b.shape[1] != a.shape[0]
