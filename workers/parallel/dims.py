"""The parallel axes of a role's ranks, as plain numbers; does not import torch.

    pp         different layers (pipeline stages)
    replicate  a full copy of the model, different rows
    shard      a shard of every weight, different rows (FSDP)
    sp         the same rows, different tokens of them (sequence parallel)
    tp         the same tokens, a shard of the matrices (tensor parallel)

Along tp, rank numbers are consecutive; pp is the slowest axis. Rows of a batch are divided over
replicate x shard. Ranks that differ only along pp, sp or tp have the same rows and form one model
group. For experts, the axes shard x sp are divided differently (tp is then 1): groups of ep
consecutive ranks have different experts, and FSDP shards each expert over the efsdp ranks that have
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AXES = ("pp", "replicate", "shard", "sp", "tp")
"""Axes in the order of the mesh, the fastest last."""
DATA, LOSS, MODEL = ("replicate", "shard"), ("replicate", "shard", "sp"), ("pp", "sp", "tp")
"""Axes along which ranks have, in this order: different rows, different tokens, the same rows."""


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the parallel axes."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    def axes(self) -> dict[str, int]:
        """Return the sizes by name, in the order of the mesh."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def world(self) -> int:
        """Number of ranks of the role."""
        return math.prod(self.axes().values())

    def describe(self) -> str:
        """Return the axes as text, such as `shard 2, tp 4`; "" if FSDP is the only axis."""
        sizes = {**self.axes(), "ep": self.ep}
        shown = sizes if self.world != self.shard or self.ep > 1 else {}
        return ", ".join(f"{name} {size}" for name, size in shown.items() if size > 1)

    @property
    def data_size(self) -> int:
        """Number of chunks that a batch is divided into."""
        return self.replicate * self.shard

    @property
    def model_size(self) -> int:
        """Number of ranks that have the same rows."""
        return self.pp * self.sp * self.tp

    @property
    def per_stage(self) -> int:
        """Number of ranks that have the same layers; their numbers are consecutive."""
        return self.world // self.pp

    @property
    def efsdp(self) -> int:
        """Number of ranks over which the weights of an expert are sharded."""
        return self.shard * self.sp * self.tp // self.ep

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank along every axis."""
        position = {}
        for name in reversed(AXES):
            rank, position[name] = divmod(rank, getattr(self, name))
        return position

    def data_rank(self, rank: int) -> int:
        """Return the number of the chunk of a batch that a rank gets."""
        at = self.coordinates(rank)
        return at["replicate"] * self.shard + at["shard"]

    def is_collect(self, rank: int) -> bool:
        """True for the first rank of a group's last stage, which returns the group's results."""
        at = self.coordinates(rank)
        return at["pp"] == self.pp - 1 and at["sp"] == at["tp"] == 0
