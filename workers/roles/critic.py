"""The critic: the value model in training, and frozen copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import WeightSyncError
from workers.columns import SEQUENCE_COLUMNS, batch_columns
from workers.config import (
    CriticConfig,
    FSDPConfig,
    WorkersConfig,
    critic_model,
    critic_optim,
    shuffle_seed,
)
from workers.losses.aggregate import Denominators, LossAndMetrics, agg_loss
from workers.losses.value import compute_value_loss
from workers.models.precision import precision_of
from workers.roles.model_worker import ENGINE_DISPATCH, TRAIN_DISPATCH, LossFactory, ModelWorker
from workers.training.checkpoints.calls import CheckpointMixin
from workers.training.engine import TrainEngine
from workers.training.loss import Loss
from workers.training.mfu import utilization
from workers.training.microbatch import Columns, MicroBatchBudget, MiniBatch, pass_budget
from workers.training.moving_average import MovingAverageTrainEngine
from workers.training.role_model_spec import RoleModelSpec
from workers.training.update import update_model
from workers.weights.transfer import WeightReceiver, WeightSender


def critic_budget(config: WorkersConfig) -> MicroBatchBudget:
    """Return the micro-batch budget of the critic, which its copies share."""
    critic = config.critic
    return pass_budget(
        config, critic.ppo_micro_batch_size_per_gpu, critic.ppo_max_token_len_per_gpu
    )


class CriticWorker(CheckpointMixin, WeightSender, ModelWorker):
    """Predicts the return before each response token, and trains on observed returns.

    Example:

        class ClampedCritic(CriticWorker):      # role_workers.critic=my_module.ClampedCritic
            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            def compute_values(self, data: DataProto) -> DataProto:
                values = super().compute_values(data)
                return write_columns(values, values=values.batch["values"].clamp(0, 1))
    """

    engine: TrainEngine

    def __init__(self, config: WorkersConfig) -> None:
        """Build the model and its training engine."""
        super().__init__()
        self.config: CriticConfig = config.critic
        actor, critic = config.actor_rollout_ref.actor, config.critic
        self.loss_agg_mode = critic.loss_agg_mode or actor.loss_agg_mode
        self.loss_scale_factor = actor.loss_scale_factor
        self.shuffle_seed = shuffle_seed(actor)
        self.budget = critic_budget(config)
        self.engine = TrainEngine(
            self.role_model(config), optim_config=critic_optim(config), grad_clip=critic.grad_clip
        )
        self.split_calls_by(self.engine)

    @classmethod
    def role_model(cls, config: WorkersConfig, role: str = "critic") -> RoleModelSpec:
        """Describe the value model, which is trained."""
        critic, model = config.critic, critic_model(config)
        actor, num_samples = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
        return RoleModelSpec(
            "critic.model.path",
            model,
            FSDPConfig(**critic.model.fsdp_config),
            critic.strategy,
            "scalar",
            trains=True,
            quantization=model.quantization,
            saved=critic.checkpoint.save_contents,
            section="critic.model",
            rows=critic.ppo_micro_batch_size_per_gpu,
            tokens=critic.ppo_max_token_len_per_gpu,
            trained_rows=critic.ppo_micro_batch_size_per_gpu,
            mini_batch=(critic.ppo_mini_batch_size or actor.ppo_mini_batch_size) * num_samples,
            epochs=critic.ppo_epochs or actor.ppo_epochs,
            parallel=config.axes(critic.parallel),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int = 0) -> None:
        """Load the model; the value head is zero unless the folder is a one-label classifier."""
        super().init_model(total_steps)
        # a frozen copy stores its weights in the dtype of its passes
        self.sent_dtype = precision_of(self.engine.model_config, self.device.type).compute

    @register(dispatch_mode=TRAIN_DISPATCH, readonly=True)
    @batch_columns(reads=SEQUENCE_COLUMNS, scores=True)
    def compute_values(self, data: DataProto) -> DataProto:
        """Return `values`; entry j is the output at the position before response token j.

        Values are zero outside the response mask.
        """
        columns = self.engine.forward_rows(data, self.budget)
        return DataProto.from_dict(columns)

    @register(dispatch_mode=TRAIN_DISPATCH, blocking=False, readonly=True)
    @batch_columns(reads=(*SEQUENCE_COLUMNS, "sample_number", "values", "returns"))
    def update_critic(self, data: DataProto) -> dict[str, Any]:
        """Train the model on the returns. Metrics outside perf/ are equal on all ranks."""
        with utilization("critic", self.engine) as mfu:
            metrics = update_model(
                self.engine,
                data,
                self.losses()["value"](data),
                budget=self.budget,
                shuffle_seed=self.shuffle_seed,
            )
        return {f"critic/{name}": value for name, value in metrics.items()} | mfu

    def losses(self) -> dict[str, LossFactory]:
        """Return `value`, the loss of `update_critic`."""
        return {"value": lambda _: Loss("value", self.loss, ("values", "returns"))}

    def loss(
        self,
        outputs: Columns,
        columns: Columns,
        batch: MiniBatch,
        settings: CriticConfig | None = None,
    ) -> LossAndMetrics:
        """Return the contribution of this micro-batch to the value loss and its metrics."""
        settings = settings or self.config
        predicted, mask = outputs["values"], columns["response_mask"]
        divisors: Denominators = {**batch.denominators, "loss_scale_factor": self.loss_scale_factor}
        loss, clipped = compute_value_loss(
            predicted,
            columns["returns"],
            columns["values"],
            mask,
            settings.cliprange_value,
            settings.loss_agg_mode or self.loss_agg_mode,
            **divisors,
        )
        mean = agg_loss(predicted, mask, "token-mean", **batch.denominators)
        return loss, {"vf_loss": loss, "vf_clipfrac": clipped, "vpred_mean": mean}


class CriticCopyWorker(WeightReceiver, ModelWorker):
    """A frozen copy of the critic, which predicts values where samples are generated.

    In an asynchronous run whose generators score their own samples
    (`async_training.score_on=generator`), each generator has one. It receives the critic's weights
    version by version, as a rollout receives the actor's, and has none before the first delivery.
    """

    engine: MovingAverageTrainEngine

    def __init__(self, config: WorkersConfig) -> None:
        """Build the model, which receives its weights from the critic."""
        super().__init__()
        self.budget = critic_budget(config)
        self.engine = MovingAverageTrainEngine(self.role_model(config), decay=0.0)
        self.split_calls_by(self.engine)

    @classmethod
    def role_model(cls, config: WorkersConfig, role: str = "critic_copy") -> RoleModelSpec:
        """Describe the critic's model, but frozen and without the critic's parallel axes."""
        model = CriticWorker.role_model(config)
        fsdp = replace(model.fsdp, fsdp_size=-1)
        return replace(model, trains=False, saved=(), fsdp=fsdp, parallel=None, quantization=None)

    @register(dispatch_mode=TRAIN_DISPATCH, readonly=True)
    @batch_columns(reads=SEQUENCE_COLUMNS, scores=True)
    def compute_values(self, data: DataProto) -> DataProto:
        """Return `values`, and `value_version`, the version of the weights."""
        columns = self.forward(data)
        version = torch.full((len(data),), self.engine.version or 0)
        return DataProto.from_dict({**columns.columns, "value_version": version})

    @register(dispatch_mode=ENGINE_DISPATCH, readonly=True)
    def forward(self, data: DataProto, outputs: Sequence[str] = (), top_k: int = 0) -> DataProto:
        """Return the values under the most recently delivered weights."""
        if self.engine.version is None:
            raise WeightSyncError(
                f"{self.role}: this copy of the critic has no weights: none were sent, or a rank "
                "rejected them. Send them with deliver_weights(critic_group, copy_group)."
            )
        return super().forward(data, outputs, top_k)
