"""A training engine whose model gives one number a row: reward models, frozen or in training.

engine = ScoreEngine(model_config, fsdp_config, head="score")
engine.build(worker)
scores = engine.score_rows(data, Budget(rows=8))        # [rows]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from workers.training.engine import TOKENS, TrainEngine
from workers.training.microbatch import Budget, Columns
from workers.training.packing import last_token_reads, read

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

ScoreAt = Literal["last_token", "legacy_mean"]
"""last_token: the head's number at a row's last real token. legacy_mean: its mean over all of them.
"""


class ScoreEngine(TrainEngine):
    """Reads a row's score from the scalar head; padding is never looked at."""

    forward_inputs: ClassVar[Sequence[str]] = TOKENS

    def __init__(self, *args: Any, score_at: ScoreAt = "last_token", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.score_at = score_at

    def score_rows(self, data: DataProto, budget: Budget) -> Tensor:
        """[rows]; zero for a row without tokens."""
        return self.forward_rows(data, budget)["scores"]

    def reads(self, columns: Columns) -> Tensor:
        """[rows, T]: the positions that the score is of."""
        if self.score_at == "legacy_mean":
            return columns["attention_mask"] != 0
        return last_token_reads(columns)

    def outputs(
        self,
        columns: Columns,
        temperature: float = 1.0,
        want_entropy: bool = False,
        want_sum_pi_squared: bool = False,
    ) -> Columns:
        """One forward pass: `scores` [rows]."""
        reads = self.reads(columns)
        numbers = read(self.module, self.feed(columns))[:, 0].float()
        rows = reads.nonzero()[:, 0].to(self.device)
        sums = torch.zeros(len(reads), device=self.device).index_add(0, rows, numbers)
        return {"scores": sums / reads.sum(dim=1).clamp(min=1).to(self.device)}
