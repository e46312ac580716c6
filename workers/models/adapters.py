"""A low-rank adapter and the weight that it stands beside: both together are one weight.

They are merged where the adapter is trained, and where a rollout has been sent base and factors
apart.
"""

from __future__ import annotations

from torch import Tensor

PARTS = ("weight", "lora_A", "lora_B")
"""What a layer with an adapter is sent as: the base's weight and two factors, `layer.<part>`."""


def merged_weight(base: Tensor, a: Tensor, b: Tensor, scaling: float, transposed: bool) -> Tensor:
    """base + scaling * b @ a in float32; `transposed` where the base is [in, out]."""
    delta = scaling * (b.float() @ a.float())
    return base.float() + (delta.T if transposed else delta)


def misfit(base: Tensor, a: Tensor, b: Tensor, transposed: bool) -> bool:
    """Whether these shapes cannot be one weight's."""
    out_by_in = base.shape[::-1] if transposed else base.shape
    return (b.shape[0], a.shape[1]) != tuple(out_by_in) or b.shape[1] != a.shape[0]
