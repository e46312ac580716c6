"""Gradients of a worker's mini-batch, and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from verl_like.batch.protocol import DataProto
from workers.parallel.fsdp import full_tensor
from workers.training.engine import INPUTS
from workers.training.loss import Loss
from workers.training.microbatch import MicroBatchBudget, Rows, mini_batch
from workers.training.passes.lm_head import TokenOutputs

Gradients = dict[str, torch.Tensor]
THREE_ROWS = MicroBatchBudget(rows=3)
ACTOR_COLUMNS = ("old_log_probs", "advantages", "ref_log_prob")


def gradients(
    worker: Any,
    data: DataProto,
    names: Sequence[str],
    budget: MicroBatchBudget = THREE_ROWS,
) -> Gradients:
    """Return full gradients of one mini-batch, by name, of the trained weights."""
    engine = worker.engine
    rows = Rows.from_batch(data, (*INPUTS, *names), engine.dims.data_size)
    batch = mini_batch(rows, 0, 1, engine.groups.data)
    with engine.running(engine.optimizer):
        engine.forward_backward(batch, budget, loss_of(worker, data))
        engine.sum_gradients()
    full = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            full[name] = full_tensor(parameter.grad).clone()
    engine.optimizer.zero_grad()
    return full


def loss_of(worker: Any, data: DataProto) -> Loss:
    """Return the worker's own loss, with entropies."""
    make, *_ = worker.losses().values()
    return replace(make(data), token_outputs=TokenOutputs(entropy=True))


def assert_equal_gradients(grads: Gradients, expected: Gradients) -> None:
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() <= 1e-6 * grad.norm(), name
        assert torch.isfinite(grad).all()
