"""Norms and products of gradients, which are taken instead of an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.models.state import local_shard
from workers.parallel.groups import RankGroups
from workers.training.engine import TrainEngine
from workers.training.microbatch import all_reduce
from workers.training.optim import num_shards


def take_gradients(engine: TrainEngine, keep: bool = False) -> dict[str, float]:
    """Clear the accumulated gradients; return their `norm`, and `dot`, their product with the kept.

    With `keep`, they are kept for the products of later calls. Every rank must call this.
    """
    assert engine.optimizer is not None, "take_gradients: this engine is frozen"
    engine.sum_gradients()
    copies = {id(engine.module.get_parameter(name)) for name in engine.layers.copies}
    gradients = {
        number: parameter.grad
        for number, parameter in enumerate(engine.parameters())
        if parameter.grad is not None and id(parameter) not in copies
    }
    if keep:
        engine.stored_gradients = gradients
    both = sorted(gradients.keys() & engine.stored_gradients.keys())
    pairs = [(gradients[number], engine.stored_gradients[number]) for number in both]
    square = product([(gradient, gradient) for gradient in gradients.values()], engine.groups)
    numbers = {"norm": math.sqrt(square), "dot": product(pairs, engine.groups)}
    engine.optimizer.zero_grad(set_to_none=True)
    engine.has_gradients, engine.gradient_rows = False, []
    return numbers


def product(pairs: Sequence[tuple[Tensor, Tensor]], groups: RankGroups) -> float:
    """Return the sum of products of pairs of gradients over all ranks; every rank calls this.

    A gradient that n ranks hold identically counts as an n-th on each.
    """
    num_holders = groups.dims.world // groups.dims.pp
    total = torch.zeros((), dtype=torch.float64)
    for x, y in pairs:
        dot = local_shard(x).double().flatten() @ local_shard(y).double().flatten()
        total += dot.cpu() * num_shards(x) / num_holders
    return float(all_reduce(total, groups.world))
