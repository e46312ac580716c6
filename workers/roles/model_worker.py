"""The low-level calls of every role with a model, called verbs; a frozen role has only `forward`.

    group.forward(batch, ("log_probs", "entropys"))             # columns
    group.forward_backward(batch, "policy")                     # metrics and the model's outputs
    group.optim_step(OptimStepSettings(lr=1e-6))                # metrics; gradients are cleared
    group.save_checkpoint(path); group.load_checkpoint(path)    # of a trained role

Updates (`update_actor`, `update_critic`, `update_model`) run the same operations inside the worker
(`workers.training.update`), so a driver that calls the verbs gets the same weights, bit for bit.

A batch is split over data-parallel ranks. All ranks of a model-parallel group get the same rows,
and one of them returns the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import (
    Dispatch,
    dispatch_one_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl_like.calls.result import CallResult
from verl_like.errors import BatchError, ConfigError, nearest
from verl_like.process.worker import Worker
from workers.parallel.sharding import dims_of
from workers.training.loss import Loss
from workers.training.microbatch import MicroBatchBudget
from workers.training.optim import CONFIGURED, OptimStepSettings
from workers.training.passes.lm_head import TokenOutputs

MESH = "train"
TRAIN_DISPATCH = make_nd_compute_dataproto_dispatch_fn(MESH)
"""The dispatch mode of methods that run passes over rows."""
SETTINGS = (str, int, Sequence, Mapping, OptimStepSettings, type(None))


def _dispatch_by_type(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    def by_rank(value: Any) -> Any:
        dispatch = (
            dispatch_one_to_all if isinstance(value, SETTINGS) else TRAIN_DISPATCH.dispatch_fn
        )
        (values,), _ = dispatch(target, value)
        return values

    return tuple(map(by_rank, args)), {name: by_rank(value) for name, value in kwargs.items()}


ENGINE_DISPATCH = replace(TRAIN_DISPATCH, dispatch_fn=_dispatch_by_type)
"""The dispatch mode of engine methods: a batch is split over ranks, settings go to all ranks."""

LossFactory = Callable[[DataProto], Loss]
"""A function that returns the loss of an update on a batch."""


class ModelWorker(Worker):
    """Base of all workers with a model: runs passes over rows with `self.engine`."""

    engine: Any
    budget: MicroBatchBudget
    """Micro-batch budget of `forward_backward`."""
    log_prob_budget: MicroBatchBudget | None = None
    """Micro-batch budget of `forward`, if it differs."""
    temperature = 1.0
    """Divisor of the logits."""
    routed: Sequence[str] = ()
    """Columns with the experts that the rollout chose for each token, if they are replayed."""

    def split_calls_by(self, engine: Any) -> None:
        """Split the role's later calls over the data-parallel ranks of this engine."""
        dims = dims_of(self.world_size, engine.sharding)
        place = dims.data_rank(self.rank), dims.is_collect(self.rank)
        self._register_dispatch_collect_info(MESH, *place)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int = 0) -> None:
        """Load the model; the LR schedule spans `total_steps` calls of the role's update."""
        self.engine.build(self, total_steps)

    def losses(self) -> dict[str, LossFactory]:
        """Return the losses of `forward_backward`, by name; a frozen role has none."""
        return {}

    @register(dispatch_mode=ENGINE_DISPATCH, readonly=True)
    def forward(self, data: DataProto, outputs: Sequence[str] = (), top_k: int = 0) -> DataProto:
        """Return the columns `outputs` of the model's outputs, by default all that it computes.

        A token head computes `log_probs`, and on request `entropys` and `sum_pi_squared`, and the
        `top_k` likeliest tokens of the vocabulary (`TokenOutputs`). Other heads compute `values` or
        `scores`.
        """
        extra = "entropys" in outputs, "sum_pi_squared" in outputs
        budget = self.log_prob_budget or self.budget
        columns = self.engine.forward_rows(
            data, budget, TokenOutputs(self.temperature, *extra, top_k), self.routed
        )
        for name in outputs:
            if name not in columns:
                raise BatchError(
                    f"{self.role}.forward: the model has no output {name!r}; it has "
                    f"{', '.join(columns)}.{nearest(name, columns)}"
                )
        return DataProto.from_dict({name: columns[name] for name in outputs or columns})

    @register(dispatch_mode=ENGINE_DISPATCH, readonly=True)
    def forward_backward(
        self, data: DataProto, loss: str, denominators: Mapping[str, int] | None = None
    ) -> CallResult:
        """Add the gradients of a loss on this batch to the accumulated gradients.

        Returns metrics, and the model's outputs for every row, detached. The batch counts as a
        whole mini-batch. If it is a part of one, give the mini-batch's counts as `denominators`:
        `num_rows`, and `num_tokens` (the tokens in the loss).
        """
        known = self.losses()
        if loss not in known:
            why = " This role is frozen."
            if known:
                why = f"{nearest(loss, known)} Known: {', '.join(known)}."
            raise ConfigError(f"{self.role}.forward_backward: there is no loss {loss!r}.{why}")
        loss_of_batch = known[loss](data)
        metrics, outputs = self.engine.forward_backward_rows(
            data, self.budget, loss_of_batch, denominators
        )
        if loss_of_batch.extra_metrics is not None:
            metrics |= loss_of_batch.extra_metrics(self.engine.groups.batch)
        return CallResult(DataProto.from_dict(outputs), metrics)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def optim_step(self, settings: OptimStepSettings = CONFIGURED) -> dict[str, Any]:
        """Take an optimizer step with the accumulated gradients, and clear them.

        Returns `grad_norm`, `lr` and `skipped_steps`, which is 1 if the norm was not finite.
        """
        if not self.losses():
            raise ConfigError(
                f"{self.role}.optim_step: the model is frozen, so it cannot be updated."
            )
        with self.engine.running(self.engine.optimizer):
            metrics: dict[str, Any] = self.engine.optim_step(settings)
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_gradients(self, keep: bool = False) -> dict[str, float]:
        """Clear the gradients; return their `norm`, and `dot`, their product with kept ones."""
        from workers.training.gradient_products import take_gradients

        with self.engine.running():
            return take_gradients(self.engine, keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Return a hash of the full weights."""
        checksum: str = self.engine.weights_checksum()
        return checksum
