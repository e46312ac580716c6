"""Workers of supervised recipes: each `update_model` takes one optimizer step on its rows.

A recipe's worker defines how rows enter a pass, which outputs are read, which columns its loss
reads, and the loss. This module has SFT and reward-model training; preference training is in
`workers.roles.preference`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import register
from verl_like.calls.result import CallMetrics
from workers.config.rows import RewardModelTrainingConfig, RowWorkerConfig
from workers.losses.aggregate import LossAndMetrics, compute_lm_loss
from workers.losses.preference import compute_reward_loss, get_pairwise_loss, rank_accuracy
from workers.models.causal_lm import Head
from workers.roles.model_worker import TRAIN_DISPATCH, LossFactory, ModelWorker
from workers.training.checkpoints.calls import CheckpointMixin
from workers.training.engine import TrainEngine
from workers.training.loss import Loss
from workers.training.mfu import memory_in_use, utilization
from workers.training.microbatch import Columns, MicroBatchBudget, MiniBatch
from workers.training.passes.forward_backward import Reading
from workers.training.role_model_spec import RoleModelSpec
from workers.training.row_scores import Pairs, RowScores
from workers.training.update import update_model


class RowWorker(CheckpointMixin, ModelWorker):
    """Base of the workers of SFT, reward-model and preference training."""

    head: ClassVar[Head] = "token"
    loss_name: ClassVar[str] = "loss"
    """Name of the loss in `forward_backward`."""
    loss_columns: Sequence[str] = ()
    """Columns that the loss reads in addition to those of every pass."""

    def __init__(self, config: RowWorkerConfig) -> None:
        super().__init__()
        self.config = config
        self.budget = MicroBatchBudget.of(config.data)
        self.engine = TrainEngine(
            self.role_model(config),
            optim_config=config.optim,
            grad_clip=config.grad_clip,
            reading=self.reading(),
        )
        self.split_calls_by(self.engine)

    @classmethod
    def role_model(cls, config: RowWorkerConfig, role: str = "") -> RoleModelSpec:
        """Describe the model, which is trained."""
        model = config.model
        return RoleModelSpec(
            "model.path",
            model,
            model.fsdp_config,
            model.strategy,
            cls.head,
            trains=True,
            quantization=model.quantization,
            saved=config.checkpoint.save_contents,
            parallel=config.parallel,
            section="model",
        )

    def reading(self) -> Reading:
        """Return how the model's passes read rows; by default, one output per response token."""
        return Reading()

    def losses(self) -> dict[str, LossFactory]:
        """Return the loss of `update_model`."""
        return {self.loss_name: lambda _: Loss(self.loss_name, self.loss, self.loss_columns)}

    @abstractmethod
    def loss(self, outputs: Columns, columns: Columns, batch: MiniBatch) -> LossAndMetrics:
        """Return the contribution of this micro-batch to the loss and the metrics."""

    @register(dispatch_mode=TRAIN_DISPATCH, readonly=True)
    def update_model(self, data: DataProto) -> CallMetrics:
        """Take one optimizer step on all of these rows; return its metrics."""
        with utilization("model", self.engine) as mfu:
            loss = self.losses()[self.loss_name](data)
            metrics = update_model(self.engine, data, loss, budget=self.budget)
        named = {f"train/{name}": value for name, value in metrics.items()}
        return named | mfu | memory_in_use(self.engine.device)


class SFTWorker(RowWorker):
    """Trains on the tokens that `loss_mask` marks, with cross entropy."""

    loss_name = "lm"

    @register(dispatch_mode=TRAIN_DISPATCH, readonly=True)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return `log_probs` of the tokens in the loss, zero elsewhere."""
        columns = self.engine.forward_rows(data, self.budget)
        return DataProto.from_dict(columns)

    def loss(self, outputs: Columns, columns: Columns, batch: MiniBatch) -> LossAndMetrics:
        mask = columns["response_mask"]
        loss = compute_lm_loss(outputs["log_probs"], mask, **batch.denominators)
        return loss, {"loss": loss}


class RewardModelTrainingWorker(RowWorker):
    """Trains a model to score the chosen side of a pair above the rejected side.

    This is not the frozen model that scores PPO's samples (`workers.roles.reward_model`).
    """

    loss_name = "pairwise"
    config: RewardModelTrainingConfig
    head: ClassVar[Head] = "scalar"
    loss_columns = ("margin",)

    def __init__(self, config: RewardModelTrainingConfig) -> None:
        super().__init__(config)
        self.pairwise_loss = get_pairwise_loss(config.loss)

    def reading(self) -> Reading:
        """Read rows as pairs, with one score per side."""
        return Pairs(RowScores(self.config.score_at))

    @register(dispatch_mode=TRAIN_DISPATCH, readonly=True)
    def compute_scores(self, data: DataProto) -> DataProto:
        """Return `scores` [pairs, 2]: first of the chosen side, then of the rejected side."""
        scores = self.engine.forward_rows(data, self.budget)["scores"]
        return DataProto.from_dict({"scores": scores})

    def loss(self, outputs: Columns, columns: Columns, batch: MiniBatch) -> LossAndMetrics:
        """Return the loss of a micro-batch of pairs, and its metrics."""
        scores = outputs["scores"]
        losses = compute_reward_loss(
            self.pairwise_loss, scores, columns["margin"], self.config.center_coef
        )
        is_pair = columns["response_mask"].flatten(1).any(dim=1)
        share = is_pair / (batch.num_rows / 2)  # each side of a pair counts as a row
        chosen, rejected = scores.detach().unbind(dim=1)
        means = {
            "loss": losses,
            "accuracy": rank_accuracy(scores.detach()),
            "margin": chosen - rejected,
            "chosen_score": chosen,
            "rejected_score": rejected,
        }
        shares = {name: (values * share).sum() for name, values in means.items()}
        return shares["loss"], shares
