"""Along which axes a role's ranks share the work on one model, in numbers, without torch.

    pp         stages of layers
    replicate  whole copies of the model: other rows
    shard      FSDP: other rows, and a part of every weight
    sp         the same rows, a part of their tokens (sequence parallel)
    tp         the same tokens, a part of every matrix (tensor parallel)

Ranks are numbered with tp fastest. Rows of a batch are dealt over replicate x shard; ranks that
differ along pp, sp or tp alone hold the same rows and are one model group. Experts have a view of
their own: ep neighbours of the shard x sp x tp ranks hold unlike experts, and FSDP shards each of
these over the efsdp ranks that have the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AXES = ("pp", "replicate", "shard", "sp", "tp")
"""In the mesh's order, the fastest last."""
DATA, LOSS, MODEL = ("replicate", "shard"), ("replicate", "shard", "sp"), ("pp", "sp", "tp")
"""Axes along which ranks have unlike rows; unlike tokens; the same rows."""


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the axes."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    def axes(self) -> dict[str, int]:
        """Name -> size, in the mesh's order."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def world(self) -> int:
        """Ranks of the role."""
        return math.prod(self.axes().values())

    def in_words(self) -> str:
        """`shard 2, tp 4`: the axes, unless all ranks have unlike rows and share the weights."""
        own = {**self.axes(), "ep": self.ep}
        shown = own if self.world != self.shard or self.ep > 1 else {}
        return ", ".join(f"{name} {size}" for name, size in shown.items() if size > 1)

    @property
    def data_size(self) -> int:
        """Into how many pieces a batch is dealt."""
        return self.replicate * self.shard

    @property
    def model_size(self) -> int:
        """Ranks that hold the same rows."""
        return self.pp * self.sp * self.tp

    @property
    def per_stage(self) -> int:
        """Ranks that have the same layers, neighbours in number."""
        return self.world // self.pp

    @property
    def efsdp(self) -> int:
        """Ranks that share the weights of the same experts."""
        return self.shard * self.sp * self.tp // self.ep

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is along every axis."""
        found = {}
        for name in reversed(AXES):
            rank, found[name] = divmod(rank, getattr(self, name))
        return found

    def data_rank(self, rank: int) -> int:
        """Which piece of a batch a rank holds."""
        at = self.coordinates(rank)
        return at["replicate"] * self.shard + at["shard"]

    def is_collect(self, rank: int) -> bool:
        """Whether a rank answers for its model group: of the last stage, its first rank."""
        at = self.coordinates(rank)
        return at["pp"] == self.pp - 1 and at["sp"] == at["tp"] == 0
