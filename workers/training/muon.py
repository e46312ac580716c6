"""Muon for the matrices of hidden layers, AdamW for all other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from verl_like.config_key import KeyRules

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of a quintic; its iteration moves all singular values to about 1."""


class Muon(torch.optim.AdamW):
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) for the weights of linear
    layers; AdamW with `lr` for embeddings, head, norms, biases and experts that are stacked.

    A matrix [m, n] moves by `matrix_lr` * max(1, m / n)**0.5 * U, where U is its momentum with all
    singular values set to about 1. So an element of a square matrix moves by about
    `matrix_lr` / n**0.5, and with AdamW by about `lr`. Weight decay is that of AdamW, at the
    matrix's rate. A sharded matrix is gathered, and every rank computes all of U.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        fused: bool | None = None,
        matrix_lr: Annotated[float, KeyRules(at_least=0)] = 0.02,
        momentum: Annotated[float, KeyRules(at_least=0, below=1)] = 0.95,
        nesterov: bool = True,
        ns_steps: Annotated[int, KeyRules(above=0)] = 5,
    ) -> None:
        self.momentum, self.nesterov, self.ns_steps = momentum, nesterov, ns_steps
        self.matrix_lr = matrix_lr
        super().__init__(params, lr, betas, eps, weight_decay, fused=fused)

    @staticmethod
    def groups_of(module: nn.Module) -> list[dict[str, Any]]:
        """Return the trained weights of a model in two groups; Muon's has `is_matrix`."""
        ends: list[nn.Module] = []
        ends += [child for child in module.modules() if isinstance(child, nn.Embedding)]
        head: nn.Module | None = module.get_output_embeddings()  # type: ignore[operator]
        ends += [] if head is None else list(head.modules())
        at_ends = {id(weight) for end in ends for weight in end.parameters()}
        others: list[nn.Parameter] = []
        matrices: list[nn.Parameter] = []
        for weight in module.parameters():
            if weight.requires_grad:
                is_matrix = weight.dim() == 2 and id(weight) not in at_ends
                (matrices if is_matrix else others).append(weight)
        groups: list[dict[str, Any]] = [{"params": others}]
        groups += [{"params": matrices, "is_matrix": True}]
        return [group for group in groups if group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; `peak_lr` is the rate of matrices at the schedule's peak."""
        if param_group.setdefault("is_matrix", False):
            param_group |= {"lr": self.matrix_lr, "peak_lr": self.matrix_lr}
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step the matrices and drop their gradients; AdamW then steps the other weights."""
        for group in self.param_groups:
            for weight in group["params"]:
                if group["is_matrix"] and weight.grad is not None:
                    self._step_matrix(weight, group["lr"], group["weight_decay"])
                    weight.grad = None
        return super().step(closure)

    def _step_matrix(self, weight: Tensor, lr: float, weight_decay: float) -> None:
        from workers.models.state import local_rows, local_shard
        from workers.parallel.fsdp import full_tensor

        gradient = weight.grad
        assert gradient is not None, "only a weight with a gradient moves"
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average, update = local_shard(state["momentum_buffer"]), local_shard(gradient)
        average.lerp_(update, 1 - self.momentum)
        if self.nesterov:
            update.lerp_(average, self.momentum)
        else:
            update.copy_(average)
        whole = orthogonalized(full_tensor(gradient), self.ns_steps)
        scale = max(1.0, whole.shape[0] / whole.shape[1]) ** 0.5
        shard = local_shard(weight)
        shard.mul_(1 - lr * weight_decay)
        shard.sub_(local_rows(weight, whole).to(shard.dtype), alpha=lr * scale)


def orthogonalized(matrix: Tensor, num_steps: int) -> Tensor:
    """Return the matrix with singular values of about 1, by Newton-Schulz iterations.

    A step is X <- a X + (b A + c A A) X, with A = X X^T. GPUs compute it in bfloat16. CPUs do not,
    so that every sharding gives the same numbers.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x if x.device.type == "cpu" else x.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        products = x @ x.T
        x = torch.addmm(x, torch.addmm(products, products, products, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
