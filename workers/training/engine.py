"""The training engine of one model: scores rows, accumulates gradients, takes optimizer steps.

Actor, critic, reference, teacher and reward model compute with a `TrainEngine`.

    engine = TrainEngine(RoleModelSpec("model.path", model_config), optim_config=optim)
    engine.build(worker, total_steps)           # opens the process group, shards, loads
    columns = engine.forward_rows(data, MicroBatchBudget(tokens=16384))  # {"log_probs": [rows, R]}
    metrics, outputs = engine.forward_backward_rows(data, MicroBatchBudget(rows=8), loss)
    metrics |= engine.optim_step()

`workers.training.update` composes the last two into an update: epochs over mini-batches. A
`Reading` defines the outputs that are read from a forward pass. `build_model` builds the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_like.batch.ragged import to_padded
from verl_like.errors import ConfigError
from workers.columns import IMAGES, ROUTED
from workers.models.causal_lm import set_training_mode
from workers.models.precision import computing_in
from workers.parallel.fsdp import add_up_gradients
from workers.parallel.offload import to_device
from workers.training.build_model import build_model
from workers.training.loss import Loss
from workers.training.microbatch import (
    Cuts,
    MicroBatchBudget,
    MicroBatches,
    MiniBatch,
    PassOutputs,
    RowColumns,
    Rows,
    all_reduce,
    detached,
    floats,
    micro_batches,
    mini_batch,
    on_host,
    split_largest,
)
from workers.training.optim import (
    CONFIGURED,
    NonfiniteGuard,
    OptimStepSettings,
    Schedule,
    build_optimizer,
    guarded_step,
)
from workers.training.out_of_memory import run_to_the_end
from workers.training.passes.forward_backward import INPUTS, TOKENS, Reading
from workers.training.passes.lm_head import DEFAULT, TokenOutputs
from workers.training.passes.packing import PassCounts, check_rows
from workers.training.sharded_model import Model

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto
    from verl_like.process.worker import Worker
    from workers.config import OptimConfig
    from workers.training.role_model_spec import RoleModelSpec


class TrainEngine(Model):
    """One model of one role on this rank; without an optimizer config it is frozen."""

    def __init__(
        self,
        model: RoleModelSpec,
        *,
        optim_config: OptimConfig | None = None,
        grad_clip: float = 1.0,
        reading: Reading | None = None,
    ) -> None:
        """Store the options; `build` loads the model.

        Args:
            model: the role's model, its sharding and its head.
            optim_config: the optimizer and its schedule; None freezes the model.
            grad_clip: gradients are clipped to this norm.
            reading: the outputs that are read from a pass; by default, log-probs (head "token")
                or values of the response tokens.
        """
        super().__init__(replace(model, trains=optim_config is not None))
        self.optim_config = optim_config
        self.grad_clip = grad_clip
        self.reading = reading or Reading()
        self.optimizer: torch.optim.Optimizer | None = None
        self.has_gradients = False
        self.stored_gradients: dict[int, Tensor] = {}
        """Gradients by number of the parameter (`workers.training.gradient_products`)."""
        self.gradient_norms: dict[str, float] | None = None
        """Weight -> the norm of its gradient in the last step; None if they are not recorded."""
        self.smaller_budgets: dict[MicroBatchBudget, MicroBatchBudget] = {}
        """Budget that ran out of memory -> smaller budget that fitted (see `training.update`)."""
        self.work = PassCounts()
        """What the rows of the passes needed, since a call reset it (`mfu.utilization`)."""
        self.gradient_rows: list[str] = []
        """Names of the rows with gradients in the next optimizer step, for messages."""

    def build(self, worker: Worker, total_steps: int = 0) -> None:
        """Load the model on the worker's device; all ranks of the role must call this.

        The learning-rate schedule spans `total_steps` update calls.
        """
        build_model(self, worker)
        self.reading.begin(self)
        if self.optim_config is not None:
            self.optimizer = build_optimizer(self.module, self.optim_config)
            self.guard = NonfiniteGuard(self.groups)
            self.scheduler = Schedule(self.optimizer, self.optim_config, total_steps)

    def forward_rows(
        self,
        data: DataProto,
        budget: MicroBatchBudget,
        token_outputs: TokenOutputs = DEFAULT,
        names: Sequence[str] = (),
    ) -> RowColumns:
        """Return every row's `log_probs` (and `entropys`, `sum_pi_squared`), `values` or `scores`.

        `scores` is [rows]. The other columns are [rows, R], zero outside the response mask, and
        ragged if the mask is.

        Args:
            data: this rank's rows.
            budget: limit of a micro-batch.
            token_outputs: the outputs per token that are computed.
            names: further columns that the model reads.
        """
        rows = self.select_rows(data, names, self.reading.inputs)
        pass_outputs: PassOutputs = {}
        self.module.eval()
        with self.running(), torch.no_grad(), computing_in(self.module, self.cast):
            cuts = self.cut(rows.columns, budget)
            batches = micro_batches(rows.columns, cuts, self.groups.data)
            for outputs, num_real in self.layers.forward(self.reading, batches, token_outputs):
                for name, column in outputs.items():
                    pass_outputs.setdefault(name, []).append(column[:num_real])
            return self.restored(rows, pass_outputs, cuts)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context that adds to the gradients, and clears them if an error leaves it.

        Gradients of an incomplete mini-batch must not reach an optimizer step.
        """
        assert self.optimizer is not None, "a frozen engine was asked for gradients"
        try:
            yield
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)
            self.has_gradients, self.gradient_rows = False, []
            raise
        finally:
            self.module.eval()

    def prepare(self, batch: MiniBatch, budget: MicroBatchBudget) -> tuple[Cuts, MicroBatches]:
        """Return the rows of every micro-batch of a mini-batch, and the micro-batches.

        They are computed once per budget. An update prepares its next mini-batch while the device
        computes. Collective: every rank must call this.
        """
        if budget not in batch.prepared:
            cuts = self.cut(batch.columns, budget)
            batch.prepared[budget] = cuts, micro_batches(batch.columns, cuts, self.groups.data)
        return batch.prepared[budget]

    def forward_backward(
        self,
        batch: MiniBatch,
        budget: MicroBatchBudget,
        loss: Loss,
        pass_outputs: PassOutputs | None = None,
    ) -> dict[str, Tensor]:
        """Add the gradients of a mini-batch's loss to the accumulated gradients.

        Returns the metrics, summed over micro-batches and over the ranks with different rows. They
        stay on the device, so the host does not wait for the passes; `floats` reads them.

        Args:
            batch: this rank's rows of the mini-batch.
            budget: limit of a micro-batch.
            loss: the loss of a micro-batch.
            pass_outputs: the outputs of the model are appended here, one column per micro-batch.
        """
        with self.accumulating():
            _, batches = self.prepare(batch, budget)
            run = partial(self.run_passes, batch, loss, pass_outputs)
            totals, problem = run_to_the_end(self, batches, run, self.has_gradients)
            # between hosts, so that nothing waits for a device
            if all_reduce(torch.tensor(int(bool(problem))), self.groups.data):
                raise torch.OutOfMemoryError(problem or "another rank ran out of memory")
        self.has_gradients = True
        self.gradient_rows += batch.names
        metrics: dict[str, Tensor] = {}
        if self.layers.has_last:
            summed = all_reduce(torch.stack(list(totals.values())), self.groups.data)
            metrics = dict(zip(totals, summed, strict=True))
        metrics = self.layers.from_last(metrics)
        for part in self.parts:
            metrics |= part.metrics(self)
        return metrics

    def run_passes(
        self,
        batch: MiniBatch,
        loss: Loss,
        pass_outputs: PassOutputs | None,
        batches: MicroBatches,
    ) -> dict[str, Tensor]:
        """Run all passes of a mini-batch; return this rank's contributions to the metrics.

        Columns stay ragged until they reach the loss, whose arguments are padded [rows, R] as in
        verl. Token ids, their mask and their positions are padded only if the loss declares them.
        """
        for part in self.parts:
            loss = part.extend_loss(self, self.reading, batches, loss)
        set_training_mode(self.module)
        if self.gradient_watch is not None:
            self.gradient_watch.begin()

        totals: dict[str, Tensor] = {}
        names = ((batch.columns.keys() - {*TOKENS}) | {*loss.columns}) - {ROUTED, IMAGES}
        passes = self.layers.train(self.reading, batches, loss)
        with computing_in(self.module, self.cast):
            for outputs, columns, num_real, losses in passes:
                if pass_outputs is not None:
                    for name, column in outputs.items():
                        pass_outputs.setdefault(name, []).append(detached(column[:num_real]))
                rectangles = {name: to_padded(column) for name, column in outputs.items()}
                inputs = {n: to_device(to_padded(columns[n]), self.device) for n in names}
                for name, values in inputs.items():
                    # infinity becomes NaN, which no formula clamps, so the step will be skipped
                    if values.is_floating_point():
                        inputs[name] = values.masked_fill(values.isinf(), torch.nan)
                total, shares = loss.compute(rectangles, inputs, batch)
                losses.append(total)
                shares = {name: share.detach().float() for name, share in shares.items()}
                # the backward pass follows; it needs what the loss references
                del outputs, rectangles, inputs, total
                for name, share in shares.items():
                    # a dummy adds nothing
                    share = share if num_real else torch.zeros((), device=self.device)
                    totals[name] = totals[name] + share if name in totals else share
        if self.gradient_watch is not None:
            self.gradient_watch.drop_unreached(self.groups.loss)
        return totals

    def forward_backward_rows(
        self,
        data: DataProto,
        budget: MicroBatchBudget,
        loss: Loss,
        denominators: Mapping[str, int] | None = None,
    ) -> tuple[dict[str, float], RowColumns]:
        """Run `forward_backward` on a batch; return its metrics, and the outputs for every row.

        `denominators` (`num_rows`, `num_tokens`) are the counts of the mini-batch to which the
        batch belongs. By default, the batch is a whole mini-batch.
        """
        rows = self.select_rows(data, loss.columns)
        batch = mini_batch(rows, 0, 1, self.groups.data)
        counts: Mapping[str, Any] = denominators or {}
        batch = replace(batch, **counts)
        pass_outputs: PassOutputs = {}
        with self.running(self.optimizer):
            metrics = floats(self.forward_backward(batch, budget, loss, pass_outputs))
        cuts, _ = self.prepare(batch, budget)
        return metrics, self.restored(rows, pass_outputs, cuts)

    def cut(self, columns: RowColumns, budget: MicroBatchBudget) -> Cuts:
        """Return the rows of every micro-batch."""
        reads, num_stages = self.reading.reads(columns), self.dims.pp
        ids = columns["input_ids"]
        if IMAGES in columns:  # a prefix is shared only if its images are equal
            numbers = self.image_input.reader.ordered(columns[IMAGES].values[:, 0])
            ids = ids.with_values(torch.where(numbers > 0, -numbers, ids.values))
        prefixes = self.row_passes.prefixes(ids, reads)
        self.work.add(columns, reads, prefixes)
        cuts = self.row_passes.cut(reads, budget, prefixes)
        if budget.tokens is None or num_stages == 1:
            return cuts
        # at least as many micro-batches as stages, so that all stages have work
        return split_largest(cuts, self.row_passes.lengths(reads), num_stages)

    def restored(self, rows: Rows, pass_outputs: PassOutputs, cuts: Cuts) -> RowColumns:
        """Return the outputs of micro-batches in the order of the rows."""
        outputs = on_host(pass_outputs)
        columns = {name: rows.restore(column, cuts) for name, column in outputs.items()}
        of_all: RowColumns = self.layers.from_last(columns)
        return of_all

    def optim_step(self, settings: OptimStepSettings = CONFIGURED) -> dict[str, float]:
        """Clip the accumulated gradients, take an optimizer step, and clear them.

        A weight without a gradient, because it is frozen or no pass reached it, does not change and
        has no moments. If the norm is not finite, the gradients are cleared without a step. Returns
        `grad_norm`, `lr`, and `skipped_steps`, 1 if the step was skipped.
        """
        assert self.optimizer is not None, "optim_step: this engine is frozen"
        if not self.has_gradients:
            raise ConfigError("optim_step: there are no gradients. Call forward_backward first.")
        self.sum_gradients()
        grad_clip = self.grad_clip if settings.grad_clip is None else settings.grad_clip
        copies = [self.module.get_parameter(name) for name in self.layers.copies]
        if self.gradient_norms is not None:
            named = self.module.named_parameters()
            from workers.training.norms import norms_by_name  # only records need it

            self.gradient_norms = norms_by_name((name, p.grad) for name, p in named)
        with settings.applied_to(self.optimizer):
            lr: float = self.optimizer.param_groups[0]["lr"]
            norm = guarded_step(self.optimizer, self.parameters(), grad_clip, self.groups, copies)
        names, self.gradient_rows = self.gradient_rows, []
        self.has_gradients = False
        self.guard.note(norm, names)
        if settings.ends_update:
            self.scheduler.step()
        return {"grad_norm": norm, "lr": lr, "skipped_steps": float(not math.isfinite(norm))}

    def sum_gradients(self) -> None:
        """Sum gradients over the ranks that have partial gradients; called once before a step."""
        if not self.is_sharded:
            add_up_gradients(self.parameters(), self.groups.loss)
        for part in self.parts:
            part.sum_gradients()
        self.layers.sum_tied_gradients()

    def select_rows(
        self, data: DataProto, names: Sequence[str] = (), inputs: Sequence[str] = INPUTS
    ) -> Rows:
        """Return this rank's real rows of a batch, with the columns `inputs` and `names`."""
        rows = Rows.from_batch(data, (*inputs, *names), self.dims.data_size)
        check_rows(self.module, rows.columns["input_ids"])
        for part in self.parts:
            part.check_rows(rows.columns)
        if IMAGES in data.non_tensor_batch:
            images = list(data.non_tensor_batch[IMAGES][: len(rows)])
            rows.columns[IMAGES] = self.image_input.of_rows(rows.columns, images, rows.names)
        return rows
