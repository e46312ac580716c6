"""The norm of gradients on several meshes, or on none, computed by shares.

torch's norm does not support such a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from workers.models.state import local_shard
from workers.parallel.groups import Groups
from workers.training.microbatch import all_reduce


def norm_by_shares(gradients: Sequence[Tensor], groups: Groups) -> Tensor:
    """Return the norm of all gradients of the model, with one all-reduce.

    A gradient that n ranks hold identically counts as an n-th on each. A weight belongs to one
    pipeline stage only.
    """
    num_holders = groups.dims.world // groups.dims.pp
    shares = [_num_shards(gradient) / num_holders for gradient in gradients]
    norms = torch.stack(torch._foreach_norm(_local_parts(gradients), dtype=torch.float32))
    total = (norms.square() * norms.new_tensor(shares)).sum()
    return all_reduce(total, groups.world).sqrt()


def _num_shards(tensor: Tensor) -> int:
    """Return the number of shards of a tensor; further ranks hold copies."""
    count = 1
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if not isinstance(placement, Replicate):
                count *= tensor.device_mesh.size(axis)
    return count


def scale_to(gradients: Sequence[Tensor], longest: float, norm: Tensor) -> None:
    """Scale gradients of norm `norm` down to `longest`, unless they are shorter."""
    torch._foreach_mul_(_local_parts(gradients), (longest / (norm + 1e-6)).clamp(max=1.0))


def _local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [local_shard(tensor) for tensor in tensors]
