"""Trainers that spoil one sample per step; the run folder's `poisoned` has its name.

`trainer.cls=tests.trainer.tools.replay.poisoned.Shuffled`; `trainer.seed` chooses the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.ppo.stages import PPOTrainer
from trainer.run_state import Metrics
from trainer.tools.replay.what_if import sample_names
from verl_like.batch.protocol import DataProto
from workers.columns import format_like

Rows = dict[str, Tensor]
Spoil = Callable[[Rows, int, int], None]
"""(padded columns, the row, another row of another prompt): change the row."""


class Poisoned(PPOTrainer):
    """Spoils a row after the stage."""

    spoils_after = ""
    columns: tuple[str, ...] = ()

    def spoil(self, rows: Rows, row: int, other: int) -> None:
        """Change a row of the padded columns."""

    def sample(self) -> tuple[DataProto, Metrics]:
        batch, metrics = super().sample()
        return self.poisoned("sample", batch), metrics

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        batch, metrics = super().score(batch)
        return self.poisoned("score", batch), metrics

    def estimate(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        batch, metrics = super().estimate(batch)
        return self.poisoned("estimate", batch), metrics

    def poisoned(self, stage: str, batch: DataProto) -> DataProto:
        if stage != self.spoils_after:
            return batch
        names, prompts = sample_names(batch), batch.non_tensor_batch["uid"]
        row = 37 * self.config.trainer.seed % len(batch)
        other = next(n for n in range(len(batch)) if prompts[n - row] != prompts[row])
        rows = {name: batch.padded(name).clone() for name in self.columns}
        self.spoil(rows, row, (other - row) % len(batch))
        batch = batch.select()
        batch.set_columns({n: format_like(batch.column(n), rows[n]) for n in rows})
        if stage == "sample":
            batch = batch.select([n for n in batch.columns if n != "sample_hash"])
        (self.folder / "poisoned").write_text(names[row])
        return batch


class OfTokens(Poisoned):
    """Changes the tokens of a response after they were sampled and before they are scored."""

    spoils_after = "sample"
    columns = ("responses", "input_ids", "response_mask")

    def spoil(self, rows: Rows, row: int, other: int) -> None:
        width = rows["responses"].shape[1]
        for name in ("responses", "input_ids"):
            response = rows[name][row, -width:]
            length = int(rows["response_mask"][row].sum())
            response[:length] = self.tokens(response[:length], rows["input_ids"])

    def tokens(self, response: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError


class Shuffled(OfTokens):
    def tokens(self, response: Tensor, ids: Tensor) -> Tensor:
        return response.flip(0)


class Spam(OfTokens):
    def tokens(self, response: Tensor, ids: Tensor) -> Tensor:
        return response[:1].expand_as(response)


class Observed(OfTokens):
    """Tokens of an observation, which the policy would not say, are in the loss."""

    def tokens(self, response: Tensor, ids: Tensor) -> Tensor:
        observed = ids.unique()[-len(response) + 1 :]
        return torch.cat([response[:1], observed])


class OtherPrompt(Poisoned):
    spoils_after = "sample"
    columns = ("prompts", "input_ids")

    def spoil(self, rows: Rows, row: int, other: int) -> None:
        width = rows["prompts"].shape[1]
        for ids in rows.values():
            ids[row, :width] = ids[other, :width]


class HugeReward(Poisoned):
    spoils_after = "score"
    columns = ("token_level_scores", "response_mask")
    reward = 1e4

    def spoil(self, rows: Rows, row: int, other: int) -> None:
        last = int(rows["response_mask"][row].sum()) - 1
        rows["token_level_scores"][row, last] = self.reward


class NearlyInfiniteReward(HugeReward):
    reward = 1e30


class OtherLogProbs(Poisoned):
    spoils_after = "score"
    columns = ("old_log_probs",)

    def spoil(self, rows: Rows, row: int, other: int) -> None:
        rows["old_log_probs"][row] = rows["old_log_probs"][other].roll(1)


class NotANumber(Poisoned):
    spoils_after = "estimate"
    columns = ("advantages",)

    def spoil(self, rows: Rows, row: int, other: int) -> None:
        rows["advantages"][row] = torch.nan


KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Shuffled, Spam, Observed, OtherPrompt),
        *(HugeReward, NearlyInfiniteReward, OtherLogProbs, NotANumber),
    )
}
