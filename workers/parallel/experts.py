"""Experts over ranks: a rank keeps some experts of every layer, and tokens travel to theirs.

    spread_experts(module, mesh)        # mesh has one axis, "ep"

Every rank has rows of its own. A layer sorts the choices of its tokens by expert and sends each to
the rank that keeps the expert (one exchange of counts, one of tokens); the class of the experts
computes them as it would compute all; a second exchange brings the results home, where they are
weighted and added up. A rank that no token reached takes part all the same, forward and backward.
Gradients of experts are complete then: they come from the tokens of all ranks, and are never added
over the axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

from verl_like.errors import ConfigError
from workers.parallel.placements import local_part

NUM_ARGUMENTS = 3
"""Of the experts' forward pass: hidden states, the experts that tokens chose, their weights."""


class Exchange(torch.autograd.Function):
    """Rows go to the ranks of a group: `sent[r]` of them to rank r, in rank order."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, sent: list[int], received: list[int], rows: Tensor
    ) -> Tensor:
        """What the ranks sent here."""
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """They go back the way the rows came."""
        back = _exchange(gradient, ctx.received, ctx.sent, ctx.group)
        return None, None, None, back


def _exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def experts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers' routed experts, by name: modules that keep a tensor of all experts' weights."""
    for name, child in module.named_modules():
        if name.rpartition(".")[2] == "experts" and getattr(child, "num_experts", 0) > 1:
            yield name, child


def check_experts(module: nn.Module, size: int, efsdp: int = 1, key: str = "parallel.ep") -> None:
    """Refuse a model whose experts cannot be spread over `size` ranks, each cut `efsdp` times."""
    found = list(experts_of(module))
    if not found:
        raise ConfigError(
            f"{key}={size}: {type(module).__name__} has no routed experts; leave it at 1."
        )
    for name, experts in found:
        kept = list(experts.parameters(recurse=False))
        count = int(experts.num_experts)  # type: ignore[arg-type]
        arguments = inspect.signature(type(experts).forward).parameters
        if (
            not kept
            or len(list(experts.parameters())) > len(kept)
            or any(len(weight) != count for weight in kept)
            or len(arguments) != NUM_ARGUMENTS + 1
        ):
            raise ConfigError(
                f"{key}={size}: {name} is a {type(experts).__name__}, which does not keep "
                "its experts as tensors of all of them; leave it at 1."
            )
        if count % size:
            valid = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ConfigError(
                f"{key}={size} does not divide the {count} experts of {name}; valid: {valid}."
            )
        for weight in kept:
            cut_of_experts(weight, efsdp)


def cut_of_experts(weight: Tensor, size: int) -> Shard:
    """Along which dim FSDP2 cuts the experts' weights: inside every expert, in even parts."""
    for dim in range(1, weight.ndim):
        if weight.shape[dim] % size == 0:
            return Shard(dim)
    raise ConfigError(
        f"{size} ranks cannot share the same experts' weights of {list(weight.shape)}: they divide "
        "no dim but the first. Raise parallel.ep, or set a smaller fsdp_config.fsdp_size."
    )


def spread_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts of every layer; the layers send tokens from now on."""
    group, size = mesh.get_group(), mesh.size()
    check_experts(module, size)
    for _, experts in experts_of(module):
        for name, weight in list(experts.named_parameters(recurse=False)):
            spread = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(spread, requires_grad=weight.requires_grad))
        experts.num_experts = int(experts.num_experts) // size  # type: ignore[arg-type]
        experts.forward = _Spread(experts, group)  # type: ignore[method-assign]


class _OwnExperts(nn.Module):
    """The forward pass that the class of some experts has, of those that are here."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *arguments: Tensor) -> Tensor:
        result: Tensor = type(self.experts).forward(self.experts, *arguments)
        return result


class _Spread:
    """The forward pass of experts of which every rank keeps some."""

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup) -> None:
        self.own = _OwnExperts(experts)
        self.group = group

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`hidden` is [tokens, width]; `chosen` and `weights` are [tokens, choices]."""
        num_here, num_ranks = self.own.experts.num_experts, self.group.size()
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=num_here * num_ranks)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = (
            each.view(num_ranks, num_here).sum(dim=1).tolist() for each in (counts, arriving)
        )

        rows = Exchange.apply(self.group, sent, received, hidden[order // chosen.shape[-1]])
        numbers = torch.arange(num_here, device=chosen.device).repeat(num_ranks)
        numbers = numbers.repeat_interleave(arriving)[:, None]
        kept = {name: local_part(weight) for name, weight in self.own.named_parameters()}
        # weighted at home, in the precision of the weights, as one process does
        once = torch.ones_like(numbers, dtype=weights.dtype)
        done = functional_call(self.own, kept, (rows, numbers, once))
        if not len(rows):  # or the backward pass of this rank would leave the exchange out
            done = done + _nothing_of((rows, *kept.values()))
        back = Exchange.apply(self.group, received, sent, done)
        # by places, not by index_add, which adds up in another order each time on a GPU
        in_place = back.index_select(0, order.argsort()).view(*chosen.shape, -1)
        return (in_place * weights[..., None]).sum(dim=1).to(hidden.dtype)


def _nothing_of(tensors: Sequence[Tensor]) -> Tensor:
    """0, with a gradient to all of them."""
    return torch.stack([tensor.flatten()[:0].sum() for tensor in tensors]).sum()
