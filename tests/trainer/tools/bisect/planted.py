"""Trainers with one fault that other implementations have had; no setting describes it.

`trainer.cls=tests.trainer.tools.bisect.planted.EndTokenCut`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.ppo.stages import PPOTrainer
from trainer.run_state import Metrics
from verl_like.batch.protocol import DataProto
from workers.columns import format_like


def with_columns(batch: DataProto, **columns: Tensor) -> DataProto:
    """Return the batch with other numbers in padded columns."""
    batch = batch.select([name for name in batch.columns if name != "sample_hash"])
    batch.set_columns({n: format_like(batch.column(n), x) for n, x in columns.items()})
    return batch


class EndTokenCut(PPOTrainer):
    """The last token of each response is not in the loss."""

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        batch, metrics = super().score(batch)
        mask = batch.padded("response_mask").clone()
        rows = torch.arange(len(mask))
        mask[rows, mask.sum(1) - 1] = 0
        return with_columns(batch, response_mask=mask), metrics


class LogProbsWithoutTemperature(PPOTrainer):
    """Old log-probs are of the logits that are not divided by the temperature."""

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        from transformers import AutoModelForCausalLM

        batch, metrics = super().score(batch)
        if self.global_step > 1:
            return batch, metrics
        model = AutoModelForCausalLM.from_pretrained(self.config.actor_rollout_ref.model.path)
        ids, attended = batch.padded("input_ids"), batch.padded("attention_mask")
        responses = batch.padded("responses")
        width = responses.shape[1]
        positions = (attended.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids, attention_mask=attended, position_ids=positions).logits
        log_probs = logits[:, -width - 1 : -1].log_softmax(-1).gather(2, responses[:, :, None])
        old = log_probs.squeeze(2) * (batch.padded("response_mask") != 0)
        return with_columns(batch, old_log_probs=old), metrics


class ShiftedLogProbs(PPOTrainer):
    """Old log-probs are those of the token before, as with an off-by-one slice."""

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        batch, metrics = super().score(batch)
        old = batch.padded("old_log_probs").roll(1, 1)
        return with_columns(batch, old_log_probs=old), metrics


class StaleWeights(PPOTrainer):
    """The rollout never gets new weights."""

    def sync(self) -> Metrics:
        return {}


class EqualSeeds(PPOTrainer):
    """All samples of a prompt are drawn with one seed."""

    def generate(self, prompts: DataProto, attempt: int = 0) -> DataProto:
        batch = super().generate(prompts, attempt)
        count = self.config.actor_rollout_ref.rollout.n
        return batch[torch.arange(len(batch)) // count * count]


class RepeatedPrompts(PPOTrainer):
    """The prompts of step 1 are drawn again in step 2, as after a resume without the loader."""

    first: Any = None

    def generate(self, prompts: DataProto, attempt: int = 0) -> DataProto:
        if self.first is None:
            self.first = prompts
        return super().generate(self.first, attempt)
