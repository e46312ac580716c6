"""One update of a model: epochs over mini-batches, from `forward_backward` and `optim_step`.

A mini-batch is repeated in smaller passes if the GPU of a rank runs out of memory. `WeightProbe`
estimates the fraction of the weights that an update changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.errors import BatchError
from workers.models.state import local_shard
from workers.parallel.placements import is_first_replica, shard_slices
from workers.training.loss import Loss
from workers.training.microbatch import (
    MicroBatchBudget,
    MiniBatch,
    Rows,
    all_reduce,
    count_mini_batches,
    floats,
    mini_batch,
)
from workers.training.optim import OptimStepSettings
from workers.training.out_of_memory import can_repeat

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto
    from workers.training.engine import TrainEngine
    from workers.training.sharded_model import Model

logger = logging.getLogger(__name__)
Metrics = dict[str, float]


def update_model(
    engine: TrainEngine,
    data: DataProto,
    loss: Loss,
    *,
    budget: MicroBatchBudget,
    mini_batch_size: int | None = None,
    epochs: int | None = None,
    shuffle_seed: int | None = None,
    extra_batches: Sequence[tuple[DataProto, Loss]] = (),
) -> Metrics:
    """Take one optimizer step per mini-batch and epoch, then advance the learning-rate schedule.

        metrics = update_model(self.engine, data, loss, budget=MicroBatchBudget(rows=8))

    The metrics are means over the steps that were not skipped, or over all steps if all were
    skipped. `weights_changed_fraction` compares the weights before and after the update.

    Args:
        engine: the engine of the model.
        data: this rank's rows.
        loss: the loss of a micro-batch.
        budget: limit of a micro-batch.
        mini_batch_size: rows per mini-batch over all ranks; by default, as in the engine's
            `RoleModelSpec`.
        epochs: passes over the rows; by default, as in the `RoleModelSpec`.
        shuffle_seed: seed that reshuffles the rows for every epoch; None leaves their order.
        extra_batches: further rows with their own loss. Each step adds the gradient of its part.
    """
    columns = loss.columns if shuffle_seed is None else (*loss.columns, SAMPLE_NUMBER)
    rows = engine.select_rows(data, columns)
    others = [(engine.select_rows(extra, of.columns), of) for extra, of in extra_batches]

    spec = engine.spec
    count = count_mini_batches(rows.total, mini_batch_size or spec.mini_batch or rows.total)
    epochs = spec.epochs if epochs is None else epochs
    orders = epoch_rows(rows, epochs, shuffle_seed, engine.scheduler.num_steps)
    places = [(order, index) for order in orders for index in range(count)]
    results: list[tuple[dict[str, Tensor], Metrics]] = []

    def prepared(number: int) -> list[tuple[MiniBatch, Loss]]:
        """Return the mini-batches of an optimizer step, ready for their passes."""
        order, index = places[number]
        batches = [(mini_batch(order, index, count, engine.groups.data), loss)]
        for other, other_loss in others:
            share = mini_batch(other, number, len(places), engine.groups.data)
            batches.append((share, other_loss))
        for batch, _ in batches:
            engine.prepare(batch, fitting_budget(engine, batch, budget))
        return batches

    with engine.running(engine.optimizer):
        sample, batches = WeightProbe(engine), prepared(0)
        for number in range(len(places)):
            metrics: dict[str, Tensor] = {}
            with engine.accumulating():
                for batch, loss_of_batch in batches:
                    metrics |= forward_backward_with_retry(engine, batch, budget, loss_of_batch)
                if number + 1 < len(places):  # while the device computes
                    batches = prepared(number + 1)
            step = engine.optim_step(OptimStepSettings(ends_update=False))
            results.append((metrics, step))
        changed_fraction = sample.changed_fraction()

    steps: list[Metrics] = [floats(metrics) | step for metrics, step in results]
    taken = [step for step in steps if not step["skipped_steps"]]
    counted = taken or steps
    result = {name: sum(step[name] for step in counted) / len(counted) for name in counted[0]}
    result["lr"] = engine.scheduler.lr
    result["weights_changed_fraction"] = changed_fraction
    result["skipped_steps"] = float(len(steps) - len(taken))
    engine.scheduler.step()
    return result


SAMPLE_NUMBER = "sample_number"


def epoch_rows(rows: Rows, epochs: int, seed: int | None, update_call: int) -> list[Rows]:
    """Return the rows of each epoch of an update; without a seed all epochs are the same.

    Mini-batch k of K contains the samples whose position is k mod K. The position of a sample in
    the batch depends on the number of ranks, since ranks are balanced by tokens. Therefore the
    driver numbers the samples before it balances them (`sample_number`), and each order is a
    permutation of these numbers. The mini-batches then contain the same samples at every number of
    ranks. The order follows from the seed, the update call and the epoch, so checkpoints need no
    shuffling state.
    """
    if seed is None:
        return [rows] * epochs

    numbers = rows.columns[SAMPLE_NUMBER]
    if len(numbers) and int(numbers.max()) >= rows.total:
        raise BatchError(
            f"{SAMPLE_NUMBER} {int(numbers.max())} in a batch of {rows.total} samples: some "
            "samples were removed after the driver numbered them. Number them again from 0."
        )
    orders = []
    for epoch in range(epochs):
        generator = np.random.default_rng([seed, update_call, epoch])
        places = torch.from_numpy(generator.permutation(rows.total))
        orders.append(replace(rows, places=places[numbers]))
    return orders


def forward_backward_with_retry(
    engine: TrainEngine, batch: MiniBatch, budget: MicroBatchBudget, loss: Loss
) -> dict[str, Tensor]:
    """Run `engine.forward_backward` with this budget, or with a smaller one if memory runs out.

    Repeating the mini-batch computes the same gradients, as sums over more passes. The engine
    remembers which smaller budget fitted.
    """
    is_balanced = loss.is_balanced and engine.spec.router_aux_loss_coef > 0
    may_repeat = not is_balanced and can_repeat(engine, engine.has_gradients)
    while True:
        fitting = fitting_budget(engine, batch, budget)
        try:
            return engine.forward_backward(batch, fitting, loss)
        except torch.OutOfMemoryError as error:
            halved = fitting.halved() if may_repeat else None
            smaller = halved and halved.with_room(_longest(engine, batch))
            if smaller is None or smaller == fitting:
                raise
            message = str(error).partition(". ")[0]
        # outside the handler, the error is gone, and with it the frames that reference activations
        torch.cuda.empty_cache()
        logger.warning(
            "%s: the mini-batch is repeated in passes of %s instead of %s. To avoid the failed "
            "pass, set %s to this size.",
            message,
            smaller,
            fitting,
            fitting.keys,
        )
        engine.smaller_budgets[budget] = smaller


def fitting_budget(
    engine: TrainEngine, batch: MiniBatch, budget: MicroBatchBudget
) -> MicroBatchBudget:
    """Return this budget, or the smaller one that fitted after it ran out of memory."""
    smaller = engine.smaller_budgets.get(budget)
    return budget if smaller is None else smaller.with_room(_longest(engine, batch))


def _longest(engine: TrainEngine, batch: MiniBatch) -> int:
    """Return the number of tokens of the longest row of any rank, for which a budget has room."""
    lengths = engine.row_passes.lengths(engine.reading.reads(batch.columns))
    longest = torch.tensor(max(lengths, default=0))
    return int(all_reduce(longest, engine.groups.data, dist.ReduceOp.MAX))


MAX_PROBED_ELEMENTS = 4096
"""Elements of a weight that are compared."""


class WeightProbe:
    """Copies of some elements of every trained weight, the same elements for every sharding."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.before = [elements.clone() for _, elements in self._elements()]

    def changed_fraction(self) -> float:
        """Return the estimated fraction of changed weights; collective."""
        changed, total = torch.zeros((), dtype=torch.int64, device=self.model.device), 0
        for before, (share, now) in zip(self.before, self._elements(), strict=True):
            changed += share * (now != before).sum()
            total += share * now.numel()
        counts = torch.stack([changed, changed.new_tensor(total)])
        num_changed, num_weights = all_reduce(counts, self.model.groups.world).tolist()
        return float(num_changed / max(num_weights, 1))

    def _elements(self) -> Iterator[tuple[int, Tensor]]:
        """Yield views of this rank's elements, and the number of weights that each represents."""
        named = self.model.module.named_parameters()
        for name, weight in named:
            is_copy = not is_first_replica(weight, self.model.groups.stage)
            if not weight.requires_grad or name in self.model.layers.copies or is_copy:
                continue
            per_dim = MAX_PROBED_ELEMENTS ** (1 / max(weight.dim(), 1))
            strides = [math.ceil(size / per_dim) for size in weight.shape]
            local = local_shard(weight)
            for part in shard_slices(weight):
                # the multiples of the stride in the whole tensor
                places = tuple(
                    slice(here.start + -there.start % stride, here.stop, stride)
                    for here, there, stride in zip(part.local, part.place, strides, strict=True)
                )
                yield math.prod(strides), local[places]
