"""The model of supervised fine-tuning: cross entropy of the tokens that `loss_mask` marks."""

from __future__ import annotations

from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import register
from workers.losses.lm import compute_lm_loss
from workers.roles.model_worker import TRAIN
from workers.roles.rows import RowWorker
from workers.training.microbatch import Columns, MiniBatch


class SFTWorker(RowWorker):
    """Learns the marked tokens of rows, and returns their log-probs."""

    loss_name = "lm"

    @register(dispatch_mode=TRAIN, readonly=True)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return `log_probs` of the tokens in the loss, zero elsewhere."""
        columns = self.engine.forward_rows(data, self.budget)
        return DataProto.from_dict(columns)

    def loss(
        self, outputs: Columns, columns: Columns, batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask = columns["response_mask"]
        loss = compute_lm_loss(outputs["log_probs"], mask, **batch.denominators)
        return loss, {"loss": loss}
