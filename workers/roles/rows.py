"""Workers of supervised recipes: each `update_model` takes one optimizer step on its rows.

A recipe's worker defines how rows enter a pass, which outputs are read, which columns its loss
reads, and the loss. The roles of preference training are the trained model and a reference from
another model folder. Both get pairs or labeled rows. If the loss needs a reference, the update
reads its log-probs from a column that the driver computes once, before training.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import to_padded
from verl_like.calls.dispatch import Dispatch, register
from workers.config.rows import (
    PreferenceWorkerConfig,
    RewardModelTrainingConfig,
    RowWorkerConfig,
    has_reference,
    has_sft_length,
    loss_reads,
)
from workers.losses.aggregate import LossAndMetrics, compute_lm_loss
from workers.losses.preference import (
    LABELED_COLUMNS,
    SFT_LENGTH,
    compute_reward_loss,
    get_pairwise_loss,
    measures,
    rank_accuracy,
)
from workers.models.causal_lm import Head
from workers.models.lora import adapter_off
from workers.roles.model_worker import TRAIN_DISPATCH, LossFactory, ModelWorker
from workers.training.checkpoints.calls import CheckpointMixin
from workers.training.engine import TrainEngine
from workers.training.loss import Loss
from workers.training.mfu import memory_in_use, utilization
from workers.training.microbatch import Columns, MicroBatchBudget, MiniBatch
from workers.training.passes.forward_backward import Reading
from workers.training.role_model_spec import RoleModelSpec
from workers.training.row_scores import SIDES, Pairs, RowScores
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
    def update_model(self, data: DataProto) -> dict[str, Any]:
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


def reading_of(config: PreferenceWorkerConfig) -> Reading:
    """Return how rows are read for the configured loss: as labeled rows or as pairs."""
    return Reading() if loss_reads(config, "desirable") else Pairs(Reading())


class ComputesReference(ModelWorker):
    """Computes the reference's log-probs with this role's model, without its adapters.

    If the model is trained without adapters, these are the reference's log-probs only before the
    first optimizer step, and before a checkpoint is loaded.
    """

    engine: TrainEngine

    @register(dispatch_mode=TRAIN_DISPATCH, readonly=True)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return `response_log_probs` of the model without its adapters."""
        with adapter_off(self.engine.module):
            return response_log_probs(self.engine, data, self.budget)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reference_checksum(self) -> str:
        """Return a hash of the weights that `compute_ref_log_prob` uses."""
        with adapter_off(self.engine.module):
            return self.engine.weights_checksum()


class PreferenceWorker(RowWorker, ComputesReference):
    """Trains on pairs or labeled rows; can compute the reference's log-probs before training."""

    loss_name = "preference"
    config: PreferenceWorkerConfig

    def __init__(self, config: PreferenceWorkerConfig) -> None:
        columns = ["ref_log_probs"] if has_reference(config) else []
        is_labeled = loss_reads(config, "desirable")
        of_pairs = ["margin", *([SFT_LENGTH] if has_sft_length(config) else [])]
        self.loss_columns = [*columns, *(LABELED_COLUMNS if is_labeled else of_pairs)]
        super().__init__(config)

    def reading(self) -> Reading:
        return reading_of(self.config)

    def loss(self, outputs: Columns, columns: Columns, batch: MiniBatch) -> LossAndMetrics:
        """Return the contribution of this micro-batch to the loss and to each metric's mean."""
        num_tokens = columns["response_mask"].count_nonzero(dim=-1)
        known = {name: columns[name] for name in self.loss_columns}
        known["log_probs"] = outputs["log_probs"].double().sum(dim=-1)
        known["num_tokens"] = num_tokens.double()

        is_pair = num_tokens.dim() == 2
        is_real = num_tokens.gt(0).all(dim=-1) if is_pair else num_tokens > 0
        number = max(batch.num_rows, 1) / (len(SIDES) if is_pair else 1)
        shares = {}
        for name, values in measures(known, self.config).items():
            shares[name] = torch.where(is_real, values, 0).sum() / number
        return shares["loss"], shares

    @register(dispatch_mode=TRAIN_DISPATCH, readonly=True)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return `response_log_probs`: sums over each response's tokens, [pairs, 2] or [rows]."""
        return response_log_probs(self.engine, data, self.budget)


class PreferenceReferenceWorker(ComputesReference):
    """The reference, if `ref.model.path` names a model for it."""

    def __init__(self, config: PreferenceWorkerConfig) -> None:
        super().__init__()
        self.budget = MicroBatchBudget.of(config.data)
        self.engine = TrainEngine(self.role_model(config), reading=reading_of(config))
        self.split_calls_by(self.engine)

    @classmethod
    def role_model(cls, config: PreferenceWorkerConfig, role: str = "ref") -> RoleModelSpec:
        """Describe the model in the reference's folder, which is frozen."""
        path = config.ref.model.path
        assert path is not None, "the role is inactive without a folder"
        model = replace(config.model, path=path, lora_rank=0)
        return RoleModelSpec(
            "ref.model.path",
            model,
            config.ref.fsdp_config,
            config.model.strategy,
            parallel=config.parallel,
            section="ref",
        )


def response_log_probs(engine: TrainEngine, data: DataProto, budget: MicroBatchBudget) -> DataProto:
    """Return the log-prob of every response of the batch under the engine's model."""
    log_probs = to_padded(engine.forward_rows(data, budget)["log_probs"])
    # float64, because responses are long; log-probs are zero outside the response
    return DataProto.from_dict({"response_log_probs": log_probs.double().sum(dim=-1)})
