"""One update of a model: epochs over mini-batches, from `forward_backward` and `optim_step`.

Example:

    metrics = update(engine, data, loss, mini_batch_size=64, budget=MicroBatchBudget(rows=8))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verl_like.errors import BatchError
from workers.training.changes import WeightSample
from workers.training.loss import Loss
from workers.training.microbatch import (
    MicroBatchBudget,
    MiniBatch,
    Rows,
    count_mini_batches,
    floats,
    mini_batch,
)
from workers.training.optim import OptimStepSettings
from workers.training.smaller_passes import fitting_budget, forward_backward_with_retry

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto
    from workers.training.engine import TrainEngine


Metrics = dict[str, float]


def update(
    engine: TrainEngine,
    data: DataProto,
    loss: Loss,
    *,
    mini_batch_size: int,
    budget: MicroBatchBudget,
    epochs: int = 1,
    shuffle_seed: int | None = None,
    extra_batches: Sequence[tuple[DataProto, Loss]] = (),
) -> Metrics:
    """Take one optimizer step per mini-batch and epoch, then advance the learning-rate schedule.

    With a seed, the samples are reshuffled for every epoch. Each step also adds the gradient of its
    part of each of the `extra_batches`, which have their own losses. The metrics are means over the
    steps that were not skipped, or over all steps if all were skipped. `weights_changed_fraction`
    compares the weights before and after the update.
    """
    columns = loss.columns if shuffle_seed is None else (*loss.columns, SAMPLE_NUMBER)
    rows = engine.take(data, columns)
    others = [(engine.take(extra, of.columns), of) for extra, of in extra_batches]

    count = count_mini_batches(rows.total, mini_batch_size)
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
        sample, batches = WeightSample(engine), prepared(0)
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
