"""Supervised fine-tuning: the next rows, one optimizer step on them, and the loss of others.

    rows ─> update ─> next rows

The loop around a step is `trainer.loop.Trainer`. Rows, what of them is in the loss, and their order
are `trainer.data.lm_rows`; a last step of fewer rows is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from trainer.data.lm_rows import LMRow, LMRowLoader, lm_batch, read_lm_rows
from trainer.data.prompts import load_tokenizer
from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Metrics, Trainer
from trainer.run_folder.metrics import reduce_metrics
from trainer.sft.config import SFTConfig
from verl_like.batch.protocol import DataProto
from workers.columns import read_columns


class SFTTrainer(Trainer):
    """Drives the role `sft` through its steps."""

    config: SFTConfig

    def __init__(
        self,
        config: SFTConfig,
        groups: WorkerGroups,
        loader: LMRowLoader,
        validation: Sequence[LMRow] = (),
    ) -> None:
        """Nothing is computed yet; `fit` does it all."""
        super().__init__(config, groups)
        self.loader = loader
        self.validation = validation

    def step(self) -> Metrics:
        """One optimizer step."""
        with self.clock("data"):
            batch = self.loader.take(self.num_rows_of_step)
        with self.clock("update"):
            metrics = reduce_metrics(self.groups["sft"].update_model(batch))
        return metrics | {
            "train/num_tokens": num_tokens_in_loss(batch),
            "training/global_step": self.global_step,
            "training/epoch": self.loader.epoch,
        }

    @property
    def num_rows_of_step(self) -> int:
        """`data.train_batch_size`, or what the last epoch has left."""
        size = self.config.data.train_batch_size
        if self.config.trainer.total_training_steps is not None:
            return size
        return min(size, self.num_rows_of_run - (self.global_step - 1) * size)

    @property
    def num_rows_of_run(self) -> int:
        """Rows of all epochs."""
        return self.config.trainer.total_epochs * len(self.loader)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, by the number of rows or as configured."""
        by_rows = -(-self.num_rows_of_run // self.config.data.train_batch_size)
        return self.config.trainer.total_training_steps or by_rows

    @classmethod
    def prepare(cls, config: SFTConfig, at_end: ExitStack) -> tuple[Any, ...]:
        """The rows to train and to validate on."""
        tokenizer = load_tokenizer(config.model.path)
        data = config.data
        rows = read_lm_rows("data.train_files", data.train_files, tokenizer, data.max_length)
        loader = LMRowLoader(rows, config.trainer.seed, tokenizer.pad_token_id)
        if not data.val_files:
            return (loader,)
        return loader, read_lm_rows("data.val_files", data.val_files, tokenizer, data.max_length)

    @classmethod
    def worker_code(cls, config: SFTConfig) -> list[str]:
        """The worker's class and the optimizer."""
        return [*super().worker_code(config), config.optim.optimizer]

    def init_arguments(self, role: str) -> dict[str, Any]:
        """The length of the learning-rate schedule."""
        return {"total_steps": self.total_steps} if role == "sft" else {}

    @property
    def has_validation(self) -> bool:
        """Whether there are `data.val_files`."""
        return bool(self.validation)

    def validation_metrics(self) -> Metrics:
        """The mean loss over all tokens of the validation rows that are in it."""
        size = self.config.data.train_batch_size
        total = num_tokens = 0.0
        for start in range(0, len(self.validation), size):
            rows = self.validation[start : start + size]
            names = [f"val-{start + number}" for number in range(len(rows))]
            batch = lm_batch(rows, names, self.loader.pad_token_id)
            found = self.groups["sft"].compute_log_prob(batch)
            total -= float(read_columns(found, "log_probs")["log_probs"].double().sum())
            num_tokens += num_tokens_in_loss(batch)
        return {"val/loss": total / num_tokens}

    def state_dict(self) -> dict[str, Any]:
        """What the driver itself needs to go on, as JSON has it."""
        return {**super().state_dict(), "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        super().load_state_dict(state)
        self.loader.load_state_dict(state["loader"])


def num_tokens_in_loss(batch: DataProto) -> float:
    """Of all rows of a batch."""
    return float(read_columns(batch, "response_mask")["response_mask"].sum())
