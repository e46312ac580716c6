"""How a role's module lies over its ranks: FSDP2, weights as one.

The strategies are in `workers.parallel.sharding`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from workers.parallel.experts import cut_of_experts, experts_of
from workers.parallel.placements import (
    all_gather_rows,
    gather_rows,
    is_first_replica,
    local_part,
    whole_tensor,
)
from workers.parallel.sharding import is_one_unit

BUCKET_BYTES = 64 * 2**20


def shard(
    module: Any,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
    strategy: str = "fsdp",
    efsdp_mesh: DeviceMesh | None = None,
) -> bool:
    """FSDP2 with one unit per decoder layer and one for the rest, or one for all.

    Under shard_grad_op layers stay whole from one pass to the next, as the rest does. The experts
    of a layer that are spread over ranks are a unit of their own on their `efsdp_mesh`. Before a
    layer computes, the next one's weights are asked for.

    Returns whether it is one for all: so in a small model, where a collective's latency is what it
    costs. The unit that is not a layer holds what a pass begins and ends with: it is whole
    throughout, and stays so until the engine has run. Gradients are added up, not averaged; a
    weight that no token of a rank reached (an expert's) takes part with zeros, or the ranks'
    collectives would not match.
    """
    num_elements: int = sum(parameter.numel() for parameter in module.parameters())
    one_unit = is_one_unit(num_elements)
    layers = set() if one_unit else set(module._no_split_modules or ())
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        # Weights alone are cast, as on one rank; inputs of a layer come as they are.
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    if efsdp_mesh is not None:
        stays_whole = one_unit or strategy != "fsdp"
        for _, experts in experts_of(module):
            fully_shard(
                experts,
                mesh=efsdp_mesh,
                reshard_after_forward=not stays_whole,
                mp_policy=policy,
                shard_placement_fn=partial(cut_of_experts, size=efsdp_mesh["efsdp"].size()),
            )
    for child in module.modules():
        if type(child).__name__ in layers:
            fully_shard(
                child, mesh=mesh, reshard_after_forward=strategy == "fsdp", mp_policy=policy
            )
    if layers:
        _prefetch_layers(module)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_gradient_divide_factor(1.0)
            child.set_force_sum_reduction_for_comms(True)
            if hasattr(child, "set_reduce_scatter_unused_params"):  # not yet in torch 2.11
                child.set_reduce_scatter_unused_params(True, recurse=False)
    return one_unit


def _prefetch_layers(module: Any) -> None:
    """Each decoder layer asks for the next one's weights, of a list that a pass runs to its end.

    What is asked for and not run would be given, older than the weights, to a later pass.
    """
    for several in module.modules():
        units = [child for child in several.children() if isinstance(child, FSDPModule)]
        is_all = len(units) == module.config.get_text_config().num_hidden_layers
        for unit, following in itertools.pairwise(units if is_all else []):
            unit.set_modules_to_forward_prefetch([following])


def begin_pass(
    module: Any, one_unit: bool, last: bool, strategy: str = "fsdp", waits: bool = False
) -> None:
    """Before each backward pass of a mini-batch: what stays whole after it.

    Nothing does after the last one. Weights that are whole throughout a pass (under shard_grad_op
    all of them) are gathered once a mini-batch. One unit's gradients are added up over the passes
    first, then over the ranks, once; larger models reduce layer by layer, since no rank may hold
    all gradients. While a forward pass `waits` for its own backward pass, FSDP ends nothing.
    """
    module.set_reshard_after_backward(last, recurse=one_unit or strategy == "shard_grad_op")
    module.set_is_last_backward(not waits)
    if one_unit:
        module.set_requires_gradient_sync(last)  # spread experts' units, too


def note_all_units(module: Any) -> None:
    """Have FSDP take note of every unit of the module, once it has weights.

    FSDP would do so in the first pass, and a pass of a stage sees only the layers of that stage.
    Units that it missed would not be resharded, and their gradients not be reduced, at the end of a
    mini-batch whose last backward pass is another stage's.
    """
    module._get_fsdp_state()._lazy_init()


def reshard(module: Any) -> None:
    """What forward passes left whole is a shard again."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def add_up_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients that ranks hold alike over `group`, in buckets; none is left out.

    A weight that no token of a rank reached (an expert's) has a gradient of zeros there, at every
    strategy and number of ranks: the ranks stay in step, and the optimizer does the same to it.
    """
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local_part(parameter.grad))
    if group is None:
        return
    for bucket in _take_tensors(gradients, BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        for own, total in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            own.copy_(total)


def full_tensor(parameter: Tensor) -> Tensor:
    """A weight as one tensor, where its shards are; collective where it is sharded."""
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    whole = whole_tensor(tensor, all_gather_rows)
    assert whole is not None, "every rank has all rows"
    return whole


def tensor_on_first(parameter: Tensor, is_first: bool | None = None) -> Tensor | None:
    """A weight as one tensor on rank 0, None elsewhere; collective where it is sharded.

    `is_first` says which rank it is instead: of those of a stage the first.
    """
    tensor = parameter.detach()
    is_first = dist.get_rank() == 0 if is_first is None else is_first
    if not isinstance(tensor, DTensor):
        return tensor if is_first else None
    if tensor.device.type != "cpu":  # the sends of NCCL need connections of their own
        whole = full_tensor(tensor)
        return whole if is_first else None
    # other replicas do nothing
    return whole_tensor(tensor, gather_rows) if is_first_replica(tensor) else None
