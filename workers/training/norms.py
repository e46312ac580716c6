"""Norms and directions of weights, gradients and moments, for records of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def norms_by_name(named: Iterable[tuple[str, Tensor | None]], order: float = 2) -> dict[str, float]:
    """Return the norm of every tensor, by default the Euclidean, with one copy to the host."""
    tensors = {name: tensor for name, tensor in named if tensor is not None}
    norms = torch._foreach_norm([*tensors.values()], order, torch.float64) if tensors else []
    full = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    return dict(zip(tensors, torch.stack(full).tolist() if full else [], strict=True))


def projection(weight: Tensor) -> float:
    """Return a projection of a weight to fixed random signs, divided by the weight's norm.

    It changes with the weight's direction, which hardly changes the norm.
    """
    matrix = weight.detach().reshape(len(weight) if weight.dim() > 1 else 1, -1)
    left, right = (signs(size).to(matrix.device) for size in matrix.shape)
    along = float(left.double() @ (matrix @ right.to(matrix.dtype)).double())
    return along / max(float(matrix.norm()), 1e-30)


def signs(size: int) -> Tensor:
    """Return this many random signs, the same ones in every process."""
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size,), generator=generator) * 2 - 1


def moment_norms(
    optimizer: torch.optim.Optimizer, module: nn.Module
) -> dict[str, dict[str, float]]:
    """Return the norms of Adam's moments of every weight, if the optimizer has them.

    `exp_avg_sq_norms` are roots of sums, so after one step both are multiples of the gradient's.
    """
    states = [(name, optimizer.state.get(weight, {})) for name, weight in module.named_parameters()]
    first = norms_by_name((name, state.get("exp_avg")) for name, state in states)
    sums = norms_by_name(((name, state.get("exp_avg_sq")) for name, state in states), order=1)
    return {
        "exp_avg_norms": first,
        "exp_avg_sq_norms": {name: math.sqrt(total) for name, total in sums.items()},
    }
