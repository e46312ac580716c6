"""The process groups of a role's ranks, by purpose, and differentiable collectives in them.

All ranks of the role create them together, in the same order. A collective
inside a layer sends gradients in the opposite direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workers.parallel.sharding import DATA, LOSS, MODEL, ParallelDims


class RankGroups:
    """A mesh, and the process groups that contain this rank; None for a group of one rank.

    `mesh` has the axis "shard" and all axes of more than one rank, in the order of `AXES`.
    """

    def __init__(self, dims: ParallelDims, device: torch.device) -> None:
        self.dims = dims
        sizes = {name: n for name, n in dims.axes().items() if n > 1 or name == "shard"}
        self.mesh = init_device_mesh(
            device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
        self.world = dist.group.WORLD if dims.world > 1 else None
        self.is_first = self.world is None or self.world.rank() == 0
        self.data = self._along(DATA)
        """Ranks with different rows: counts of rows and tokens are summed over it."""
        self.loss = self._along(LOSS)
        """Ranks with different tokens: gradients and contributions to a loss are summed over it."""
        self.model = self._along(MODEL)
        """Ranks that have the same rows and therefore run the same passes."""
        self.sp = self._along(("sp",))
        self.tp = self._along(("tp",))
        self.pp = self._along(("pp",))
        self.batch = self._along(("pp", *DATA))
        """Ranks with the same place along sp and tp: all stages of all model groups. The last stage
        has the metrics.
        """

    def _along(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        sizes = self.dims.axes()
        named = tuple(name for name in sizes if name in axes and sizes[name] > 1)
        if not named:
            return None
        if math.prod(sizes[name] for name in named) == self.dims.world:
            return self.world
        return self._flat(*named).get_group()

    def links(self, count: int) -> list[dist.ProcessGroup]:
        """Return `count` more groups along "pp", one for each direction in which states travel."""
        lines = torch.arange(self.dims.world).view(self.dims.pp, -1).T.tolist()
        return [dist.new_subgroups_by_enumeration(lines)[0] for _ in range(count)]

    @property
    def stage(self) -> range:
        """The ranks that have the same layers as this rank, which is one of them."""
        rank, size = 0 if self.world is None else self.world.rank(), self.dims.per_stage
        return range(rank - rank % size, rank - rank % size + size)

    @property
    def is_first_of_stage(self) -> bool:
        """True for the first of the ranks that have the same layers."""
        return self.world is None or self.world.rank() == self.stage.start

    def _flat(self, *axes: str) -> DeviceMesh:
        """Return these axes of the mesh as one axis."""
        part = self.mesh[axes]
        return part if part.ndim == 1 else part._flatten()

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """Return the mesh for FSDP2: "shard" and "sp" combined, and "replicate" if needed."""
        shards = self._flat("shard", "sp") if self.dims.sp > 1 else self.mesh["shard"]
        if self.dims.replicate == 1:
            return shards
        return DeviceMesh._concatenate([self.mesh["replicate"], shards])

    @cached_property
    def _expert_view(self) -> DeviceMesh:
        dims = self.dims
        sizes = {"pp": dims.pp, "replicate": dims.replicate, "efsdp": dims.efsdp, "ep": dims.ep}
        return init_device_mesh(
            self.mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )

    @cached_property
    def ep_mesh(self) -> DeviceMesh:
        """Return the ranks with different experts; their numbers are consecutive."""
        return self._expert_view["ep"]

    @cached_property
    def efsdp_mesh(self) -> DeviceMesh:
        """Return the mesh over which FSDP2 shards experts: ranks that have the same experts."""
        replicates = ("replicate",) if self.dims.replicate > 1 else ()
        return self._expert_view[(*replicates, "efsdp")]


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
