"""Roles of preference training: the trained model, and a reference from another model folder.

Both get pairs or labeled rows. If the loss needs a reference, the update reads its log-probs from
a column that the driver computes once, before training.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import to_padded
from verl_like.calls.dispatch import Dispatch, register
from workers.config.rows import PreferenceWorkerConfig, has_reference, has_sft_length, loss_reads
from workers.losses.aggregate import LossAndMetrics
from workers.losses.preference import LABELED_COLUMNS, SFT_LENGTH, measures
from workers.models.lora import adapter_off
from workers.roles.model_worker import TRAIN_DISPATCH, ModelWorker
from workers.roles.rows import RowWorker
from workers.training.engine import TrainEngine
from workers.training.microbatch import Columns, MicroBatchBudget, MiniBatch
from workers.training.passes.forward_backward import Reading
from workers.training.role_model_spec import RoleModelSpec
from workers.training.row_scores import SIDES, Pairs


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
