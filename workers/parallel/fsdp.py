"""Shard a role's module over its ranks with FSDP2, and reassemble its weights.

The strategies are in `workers.parallel.sharding`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from verl_like.errors import ConfigError
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
    language: Any = None,
) -> bool:
    """Shard with FSDP2: one unit per decoder layer and one for the rest, or one for everything.

    With shard_grad_op, layers stay gathered from one pass to the next, like the unit of the rest.
    A layer's experts that are spread over ranks form a separate unit on `efsdp_mesh`. In the
    forward pass, each layer prefetches the weights of the next layer, if the rank has all layers.
    If the model has a vision tower, `language` is the part of it that all rows run through. The
    tower belongs to the unit of the rest, because only ranks whose rows have images run its layers.

    Return True if the model is one unit. Small models are, because the latency of collectives
    dominates their time. The unit of the rest is used at the beginning and the end of a pass, so it
    stays gathered until `reshard` or the last backward pass. Gradients are summed, not averaged. If
    no token of a rank reaches a weight (such as an expert's), its gradient there is zero; otherwise
    the collectives of the ranks would not match. (torch 2.11 does not support this.) A
    `GradientWatch` removes the zeros of a weight that no rank reached.
    """
    num_elements: int = sum(parameter.numel() for parameter in module.parameters())
    one_unit = is_one_unit(num_elements)
    layers = set() if one_unit else set(module._no_split_modules or ())
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        # Only weights are cast, as on one rank; the inputs of a layer are not.
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
    for child in (module if language is None else language).modules():
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
            if hasattr(child, "set_reduce_scatter_unused_params"):  # missing in torch 2.11
                child.set_reduce_scatter_unused_params(True, recurse=False)
    return one_unit


def _prefetch_layers(module: Any) -> None:
    """Let each decoder layer prefetch the next one, if their list has all layers of the model.

    Otherwise a prefetched layer that does not run would return outdated weights to a later pass.
    """
    for parent in module.modules():
        units = [child for child in parent.children() if isinstance(child, FSDPModule)]
        is_all = len(units) == module.config.get_text_config().num_hidden_layers
        for unit, next_unit in itertools.pairwise(units if is_all else []):
            unit.set_modules_to_forward_prefetch([next_unit])


def begin_pass(
    module: Any, one_unit: bool, last: bool, strategy: str = "fsdp", waits: bool = False
) -> None:
    """Set which weights of a sharded module stay gathered after the next backward pass.

    After the last pass, no weights stay gathered. Weights that stay gathered throughout a pass
    (with shard_grad_op, all weights) are gathered once per mini-batch. A model that is one unit
    first accumulates gradients over the passes, and reduces them over the ranks once. Larger models
    reduce layer by layer in every pass, so that a rank stores only its shards of the gradients. If
    `waits`, other forward passes still wait for their backward passes, so FSDP must not finalize
    the backward pass.
    """
    if not isinstance(module, FSDPModule):
        return
    module.set_reshard_after_backward(last, recurse=one_unit or strategy == "shard_grad_op")
    module.set_is_last_backward(not waits)
    if one_unit:
        module.set_requires_gradient_sync(last)  # includes the units of spread experts


def note_all_units(module: Any) -> None:
    """Make FSDP register every unit of the module, once it has weights.

    FSDP would do so in the first pass, but a pass of a stage sees only the layers of that stage. If
    the last backward pass of a mini-batch belongs to another stage, units that are not registered
    would not be resharded, and their gradients would not be reduced.
    """
    module._get_fsdp_state()._lazy_init()


def reshard(module: Any) -> None:
    """Reshard the weights that stayed gathered after forward passes."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


class GradientWatch:
    """Tells which weights of a sharded module backward passes reach, and drops other gradients.

    FSDP makes gradients of zero for the others, and an optimizer would decay those weights.

    Example:

        watch = GradientWatch(module)       # the module has its weights
        watch.begin()
        ...                                 # the passes of a mini-batch
        watch.drop_unreached(group)
    """

    def __init__(self, module: Any) -> None:
        """Hook the weights; collective, because it gathers each unit once."""
        self.module = module
        self.reached: set[str] = set()
        self.without_gradient: list[str] = []
        sharded = dict(module.named_parameters())
        for unit in [child for child in module.modules() if isinstance(child, FSDPModule)]:
            unit.unshard()
            for name, weight in module.named_parameters():
                if weight is not sharded[name] and weight.requires_grad:
                    weight.register_post_accumulate_grad_hook(partial(self._note, name))
            unit.reshard()

    def _note(self, name: str, _: Tensor) -> None:
        self.reached.add(name)

    def begin(self) -> None:
        """Start to watch the passes of a mini-batch."""
        self.reached.clear()
        named = self.module.named_parameters()
        self.without_gradient = [
            name for name, weight in named if weight.requires_grad and weight.grad is None
        ]

    def drop_unreached(self, group: dist.ProcessGroup | None) -> None:
        """Drop gradients that none of the passes of any rank of `group` contributed to."""
        weights = [self.module.get_parameter(name) for name in self.without_gradient]
        here = [name in self.reached for name in self.without_gradient]
        for weight, is_reached in zip(weights, _anywhere(here, weights, group), strict=True):
            if not is_reached:
                weight.grad = None


def add_up_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of unsharded weights over `group`, in buckets.

    A weight that only some ranks reach, such as an expert's, counts as zero on the others, so that
    the collectives match. A weight that no rank reaches stays without a gradient.
    """
    if group is None:
        return
    gradients = []
    here = [parameter.grad is not None for parameter in parameters]
    is_reached = _anywhere(here, parameters, group)
    for parameter in itertools.compress(parameters, is_reached):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local_part(parameter.grad))
    for bucket in _take_tensors(gradients, BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group)
        for gradient, total in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(total)


def _anywhere(
    here: list[bool], weights: Sequence[Tensor], group: dist.ProcessGroup | None
) -> list[bool]:
    """Return for each weight whether it is true on any rank; all ranks have the same weights."""
    if group is None or not here:
        return here
    flags = torch.tensor(here, dtype=torch.int32, device=weights[0].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in flags.tolist()]


def full_tensor(parameter: Tensor) -> Tensor:
    """Return a weight as one tensor on its device.

    If the weight is sharded, this is collective: every rank must call it.
    """
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    full = whole_tensor(tensor, all_gather_rows)
    assert full is not None, "every rank has all rows"
    return full


def tensor_on_first(parameter: Tensor, ranks: range) -> Tensor | None:
    """Return a weight as one tensor on the first of `ranks`, which have the same layers.

    The others get None. If the weight is sharded, this is collective: every rank must call it.
    """
    tensor = parameter.detach()
    # sends with NCCL would need additional connections
    if isinstance(tensor, DTensor) and tensor.device.type != "cpu":
        full = full_tensor(tensor)
        return full if dist.get_rank() == ranks.start else None
    if not is_first_replica(tensor, ranks):
        return None
    return whole_tensor(tensor, gather_rows) if isinstance(tensor, DTensor) else tensor


def experts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers' routed experts by name: modules `experts` with more than one expert."""
    for name, child in module.named_modules():
        if name.rpartition(".")[2] == "experts" and getattr(child, "num_experts", 0) > 1:
            yield name, child


def cut_of_experts(weight: Tensor, size: int) -> Shard:
    """Return how FSDP2 shards a weight: along a dimension inside each expert, in equal parts."""
    for dim in range(1, weight.ndim):
        if weight.shape[dim] % size == 0:
            return Shard(dim)
    raise ConfigError(
        f"FSDP cannot split a weight of experts of shape {list(weight.shape)} over {size} ranks: "
        f"no dim after the first is a multiple of {size}. Raise parallel.ep, or set a smaller "
        "parallel.shard or fsdp_config.fsdp_size."
    )
