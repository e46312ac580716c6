"""Differentiable collectives inside layers: gradients are sent in the opposite direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Send = Callable[[Tensor], Tensor]
"""Exchanges a tensor with other ranks; returns what this rank gets."""


class _Communicate(torch.autograd.Function):
    """Exchange a tensor in the forward pass, and its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, send: Send, send_gradient: Send) -> Tensor:
        ctx.send_gradient = send_gradient
        return send(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.send_gradient(grad), None, None


def communicate(states: Tensor, send: Send, send_gradient: Send) -> Tensor:
    """Return `send(states)`; the backward pass applies `send_gradient` to the gradient."""
    result: Tensor = _Communicate.apply(states, send, send_gradient)  # type: ignore[no-untyped-call]
    return result


def exchange(
    rows: Tensor,
    group: dist.ProcessGroup,
    sent: list[int] | None = None,
    received: list[int] | None = None,
) -> Tensor:
    """Send `sent[r]` rows to rank r, in rank order; return the `received[r]` rows of each rank.

    Without these numbers, all ranks send and receive equally many rows.
    """

    def send(rows: Tensor, sent: list[int] | None, received: list[int] | None) -> Tensor:
        num_rows = len(rows) if received is None else sum(received)
        arrived = rows.new_empty(num_rows, *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    return communicate(
        rows, lambda rows: send(rows, sent, received), lambda grad: send(grad, received, sent)
    )
