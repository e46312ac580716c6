"""The four verbs: what every role with a model can do, trained or frozen.

    group.forward(batch, ("log_probs", "entropys"))             # columns
    group.forward_backward(batch, "policy")                     # metrics and the model's outputs
    group.optim_step(StepSettings(lr=1e-6))                     # metrics; gradients are cleared
    group.save_checkpoint(path); group.load_checkpoint(path)    # of a trained role

Updates (`update_actor`, `update_critic`, `update_model`) compose the same operations on one worker
(`workers.training.update`), so a driver that calls the verbs gets the same weights, bit for bit.

Calls are dealt by the axes of the engine's ranks: the ranks of a model group get the same rows, and
one of them returns the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import (
    Dispatch,
    dispatch_one_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl_like.calls.result import Metrics, Result
from verl_like.errors import BatchError, ConfigError, nearest
from verl_like.process.worker import Worker
from workers.parallel.sharding import dims_of
from workers.training.lm_head import Wanted
from workers.training.loss import Loss
from workers.training.microbatch import Budget
from workers.training.optim import CONFIGURED, StepSettings

if TYPE_CHECKING:
    from workers.memory import EngineT, HeldModel

MESH = "train"
TRAIN = make_nd_compute_dataproto_dispatch_fn(MESH)
"""The dispatch mode of methods that run passes over rows."""
SETTINGS = (str, Sequence, Mapping, StepSettings, type(None))


def _dispatch_verb(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Split batches over the ranks, and send settings to all of them."""

    def by_rank(value: Any) -> Any:
        dispatch = dispatch_one_to_all if isinstance(value, SETTINGS) else TRAIN.dispatch_fn
        (values,), _ = dispatch(target, value)
        return values

    return tuple(map(by_rank, args)), {name: by_rank(value) for name, value in kwargs.items()}


VERB = replace(TRAIN, dispatch_fn=_dispatch_verb)
"""The dispatch mode of verbs: a batch that is split, and settings that are not."""

MakesLoss = Callable[[DataProto], Loss]
"""A batch -> the loss of an update on it."""


class ModelWorker(Worker):
    """Runs passes over rows with the model of `self.engine`."""

    engine: Any
    budget: Budget
    """What a pass of `forward_backward` may hold."""
    log_prob_budget: Budget | None = None
    """What a pass of `forward` may hold, where that is something else."""
    temperature = 1.0
    """What divides the logits."""
    routed: Sequence[str] = ()
    """Columns that say which experts a token goes to."""

    def engine_of(
        self, held: HeldModel, engine_class: Callable[..., EngineT], **settings: Any
    ) -> EngineT:
        """Return a training engine of the role's model, by whose axes calls are dealt."""
        engine: Any = held.engine(engine_class, **settings)
        self.deal_by(engine)
        return engine

    def deal_by(self, engine: Any) -> None:
        """Deal the role's calls by the axes of this engine from now on."""
        dims = dims_of(self.world_size, engine.sharding)
        place = dims.data_rank(self.rank), dims.is_collect(self.rank)
        self._register_dispatch_collect_info(MESH, *place)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int = 0) -> None:
        """Load the model; with an optimizer its schedule spans so many calls of the update."""
        self.engine.build(self, total_steps)

    def losses(self) -> dict[str, MakesLoss]:
        """The losses that `forward_backward` knows, by name; a frozen role has none."""
        return {}

    @register(dispatch_mode=VERB, readonly=True)
    def forward(self, data: DataProto, wanted: Sequence[str] = ()) -> DataProto:
        """Return the columns `wanted` of the model's outputs, or those that every pass has.

        A token head gives `log_probs`, and on request `entropys` and `sum_pi_squared`. Other heads
        give `values` or `scores`.
        """
        more = "entropys" in wanted, "sum_pi_squared" in wanted
        budget = self.log_prob_budget or self.budget
        columns = self.engine.forward_rows(
            data, budget, Wanted(self.temperature, *more), self.routed
        )
        for name in wanted:
            if name not in columns:
                raise BatchError(
                    f"{self.role}.forward: the model has no output {name!r}; it has "
                    f"{', '.join(columns)}.{nearest(name, columns)}"
                )
        return DataProto.from_dict({name: columns[name] for name in wanted or columns})

    @register(dispatch_mode=VERB, readonly=True)
    def forward_backward(
        self, data: DataProto, loss: str, denominators: Mapping[str, int] | None = None
    ) -> Result:
        """Add the gradients of a loss on this batch to those that are there.

        Returns the model's outputs for every row, without gradients, and metrics. The batch is a
        whole mini-batch, unless `denominators` (`num_rows` and `num_tokens`: rows and tokens in the
        loss) say how much the mini-batch has of which it is a part.
        """
        known = self.losses()
        if loss not in known:
            valid = "it is frozen."
            if known:
                valid = f"valid: {', '.join(known)}.{nearest(loss, known)}"
            raise ConfigError(f"{self.role}.forward_backward: no loss {loss!r}; {valid}")
        made = known[loss](data)
        metrics, outputs = self.engine.forward_backward_rows(data, self.budget, made, denominators)
        if made.measured is not None:
            metrics |= made.measured(self.engine.groups.batch)
        return Result(DataProto.from_dict(outputs), metrics)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def optim_step(self, settings: StepSettings = CONFIGURED) -> Metrics:
        """Take an optimizer step with the gradients that are there, and clear them.

        Returns `grad_norm`, `lr` and `skipped_steps`: 1 where the norm was not finite.
        """
        if not self.losses():
            raise ConfigError(f"{self.role}.optim_step: the model is frozen.")
        with self.engine.running(self.engine.optimizer):
            metrics: Metrics = self.engine.optim_step(settings)
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Return the hash of the full weights."""
        checksum: str = self.engine.weights_checksum()
        return checksum
