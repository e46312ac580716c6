"""Expert parallelism: each rank has some experts of every layer; tokens are sent to their experts.

    spread_experts(module, mesh)        # mesh has one axis, "ep"

Every rank has different tokens. A layer sorts its (token, expert) choices by expert and sends each
token to the rank of the expert (one exchange of counts, one of tokens). The experts' class computes
its outputs as usual. Another exchange returns the outputs, which are weighted and summed on the
rank of the token. A rank that receives no token still takes part in the forward and the backward
pass.

The gradients of experts come from the tokens of all ranks, so they are complete, and they are not
summed over the axis.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

from verl_like.errors import ConfigError
from workers.parallel.fsdp import cut_of_experts, experts_of
from workers.parallel.groups import exchange
from workers.parallel.placements import local_part

NUM_ARGUMENTS = 3
"""Arguments of the experts' forward pass: hidden states, chosen experts, their weights."""


def check_experts(module: nn.Module, size: int, efsdp: int = 1, key: str = "parallel.ep") -> None:
    """Reject a model whose experts cannot be spread over `size` ranks, each over `efsdp` ranks."""
    layers = list(experts_of(module))
    if not layers:
        raise ConfigError(
            f"{key}={size}: {type(module).__name__} has no routed experts. Leave {key} at 1."
        )
    for name, experts in layers:
        weights = list(experts.parameters(recurse=False))
        count = int(experts.num_experts)  # type: ignore[arg-type]
        arguments = inspect.signature(type(experts).forward).parameters
        if (
            not weights
            or len(list(experts.parameters())) > len(weights)
            or any(len(weight) != count for weight in weights)
            or len(arguments) != NUM_ARGUMENTS + 1
        ):
            raise ConfigError(
                f"{key}={size}: {name} ({type(experts).__name__}) is not supported: each "
                "parameter must have the experts as its first dim, and the forward pass must take "
                f"{NUM_ARGUMENTS} arguments (hidden states, expert indices, routing weights). "
                f"Leave {key} at 1."
            )
        if count % size:
            valid = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ConfigError(
                f"{key}={size} does not divide the {count} experts of {name}; valid: {valid}."
            )
        for weight in weights:
            cut_of_experts(weight, efsdp)


def spread_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts of every layer, and make layers send tokens to other ranks."""
    group, size = mesh.get_group(), mesh.size()
    check_experts(module, size)
    for _, experts in experts_of(module):
        for name, weight in list(experts.named_parameters(recurse=False)):
            spread = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(spread, requires_grad=weight.requires_grad))
        layer: Any = experts
        layer.num_experts = int(layer.num_experts) // size
        layer.forward = _Spread(experts, group)


class _LocalExperts(nn.Module):
    """Runs the original forward pass of the experts with the experts of this rank."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *arguments: Tensor) -> Tensor:
        result: Tensor = type(self.experts).forward(self.experts, *arguments)
        return result


class _Spread:
    """The forward pass of experts that are spread over ranks."""

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup) -> None:
        self.local = _LocalExperts(experts)
        self.group = group

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run the experts on `hidden` [tokens, width]; `chosen` and `weights` are [tokens,
        choices].
        """
        num_here, num_ranks = int(self.local.experts.num_experts), self.group.size()  # type: ignore[arg-type]
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=num_here * num_ranks)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = (
            tokens.view(num_ranks, num_here).sum(dim=1).tolist() for tokens in (counts, arriving)
        )

        rows = exchange(hidden[order // chosen.shape[-1]], self.group, sent, received)
        numbers = torch.arange(num_here, device=chosen.device).repeat(num_ranks)
        numbers = numbers.repeat_interleave(arriving)[:, None]
        weights_here = {name: local_part(weight) for name, weight in self.local.named_parameters()}
        # outputs are weighted on the token's rank, in the precision of the weights, as in one
        # process
        once = torch.ones_like(numbers, dtype=weights.dtype)
        done = functional_call(self.local, weights_here, (rows, numbers, once))
        if not len(rows):  # otherwise the backward pass of this rank would skip the exchange
            nothing = [part.flatten()[:0].sum() for part in (rows, *weights_here.values())]
            done = done + torch.stack(nothing).sum()
        back = exchange(done, self.group, received, sent)
        # indexing, because on a GPU index_add sums in a different order each time
        in_place = back.index_select(0, order.argsort()).view(*chosen.shape, -1)
        summed: Tensor = (in_place * weights[..., None]).sum(dim=1).to(hidden.dtype)
        return summed
