"""The model of supervised fine-tuning. `trainer.sft.SFTTrainer` gives it rows of `lm_rows`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.batch.tensordict_import import TensorDict
from verl_like.calls.dispatch import Dispatch, register
from verl_like.process.worker import Worker
from workers.config.sft import SFTWorkerConfig
from workers.losses.lm import compute_lm_loss
from workers.models.memory import memory_in_use
from workers.training.checkpoint import Checkpointed
from workers.training.engine import TrainEngine
from workers.training.mfu import utilization
from workers.training.microbatch import Budget, Columns, MiniBatch


class SFTWorker(Checkpointed, Worker):
    """Learns the tokens of rows that are in the loss, and says how likely they are."""

    def __init__(self, config: SFTWorkerConfig) -> None:
        super().__init__()
        self.config = config
        data = config.data
        self.budget = Budget.of(
            data.use_dynamic_bsz, data.micro_batch_size_per_gpu, data.max_token_len_per_gpu
        )
        self.engine = TrainEngine(
            config.model,
            config.model.fsdp_config,
            strategy=config.model.strategy,
            optim_config=config.optim,
            grad_clip=config.grad_clip,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int) -> None:
        """Load the model; the schedule spans `total_steps` calls of `update_model`."""
        self.engine.build(self, total_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, readonly=True)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`log_probs` of the tokens in the loss, zero elsewhere."""
        columns = self.engine.forward_rows(data, self.budget)
        return DataProto(batch=TensorDict(columns, batch_size=[len(data)]))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, readonly=True)
    def update_model(self, data: DataProto) -> dict[str, Any]:
        """One optimizer step on all of these rows; gives its metrics."""
        num_rows = len(data) if data.shard is None else data.shard.total
        with utilization("sft", self.engine, data) as mfu:
            metrics = self.engine.update(
                data,
                (),
                mini_batch_size=num_rows,
                budget=self.budget,
                epochs=1,
                loss_fn=self.loss,
            )
        named = {f"train/{name}": value for name, value in metrics.items()}
        return named | mfu | memory_in_use(self.engine.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Hash of the full weights."""
        return self.engine.weights_checksum()

    def loss(
        self, outputs: Columns, columns: Columns, batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the loss."""
        mask = columns["response_mask"]
        loss = compute_lm_loss(outputs["log_probs"], mask, **batch.denominators)
        return loss, {"loss": loss}
