"""The process groups of a role's ranks, by what they are for.

Every rank of the role makes them together, in the same order.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workers.parallel.dims import DATA, LOSS, MODEL, ParallelDims


class Groups:
    """A mesh, and of each group the one that this rank is in; None where it is alone.

    `mesh` has "shard" and the axes of more than one rank, in their order.
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
        """Ranks with unlike rows: counts of rows and tokens are summed over it."""
        self.loss = self._along(LOSS)
        """Ranks with unlike tokens: gradients, and shares of a loss, are summed over it."""
        self.model = self._along(MODEL)
        """Ranks that hold the same rows, and so run the same passes."""
        self.sp = self._along(("sp",))
        self.tp = self._along(("tp",))
        self.pp = self._along(("pp",))
        self.batch = self._along(("pp", *DATA))
        """Of each model group the first of every stage's, of which the last has the numbers."""

    def _along(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        sizes = self.dims.axes()
        named = tuple(name for name in sizes if name in axes and sizes[name] > 1)
        if not named:
            return None
        if math.prod(sizes[name] for name in named) == self.dims.world:
            return self.world
        return self._flat(*named).get_group()

    def links(self, count: int) -> list[dist.ProcessGroup]:
        """So many groups more of the ranks along "pp": for each way that states travel."""
        lines = torch.arange(self.dims.world).view(self.dims.pp, -1).T.tolist()
        return [dist.new_subgroups_by_enumeration(lines)[0] for _ in range(count)]

    @property
    def is_first_of_stage(self) -> bool:
        """Whether of the ranks with the same layers this is the first."""
        return self.world is None or self.world.rank() % self.dims.per_stage == 0

    def _flat(self, *axes: str) -> DeviceMesh:
        """These axes of the mesh as one."""
        part = self.mesh[axes]
        return part if part.ndim == 1 else part._flatten()

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """What FSDP2 shards over: "shard" and "sp" as one, under "replicate" if that is above 1."""
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
        """Ranks with unlike experts, neighbours in number."""
        return self._expert_view["ep"]

    @cached_property
    def efsdp_mesh(self) -> DeviceMesh:
        """What FSDP2 shards experts over: ranks that have the same ones."""
        replicates = ("replicate",) if self.dims.replicate > 1 else ()
        return self._expert_view[(*replicates, "efsdp")]
