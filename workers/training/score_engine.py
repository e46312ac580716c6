"""A training engine whose model gives one number a row: reward models, frozen or in training.

    engine = ScoreEngine(model_config, fsdp_config, head="score")
    engine.build(worker)
    scores = engine.score_rows(data, Budget(rows=8))        # [rows]

Where the score is read stands in `config.json` of the model's folder, as `score_at`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from verl_like.batch.ragged import Ragged
from verl_like.errors import ConfigError
from workers.config.rows import SCORE_AT
from workers.parallel.page_lock import to_device
from workers.training.engine import TOKENS, TrainEngine
from workers.training.microbatch import Budget, RowColumns
from workers.training.packing import last_token_reads, read

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto
    from verl_like.process.worker import Worker


class ScoreEngine(TrainEngine):
    """Reads a row's score from the scalar head; padding is never looked at."""

    forward_inputs: ClassVar[Sequence[str]] = TOKENS

    def __init__(self, *args: Any, score_at: str | None = None, **settings: Any) -> None:
        """`score_at` is last_token, the head's number at a row's last real token, or legacy_mean,
        its mean over all of them; None takes what the folder says.
        """
        super().__init__(*args, **settings)
        self.score_at = score_at

    def build(self, worker: Worker, total_steps: int = 0) -> None:
        """Shard and load the model, and see where its folder reads scores."""
        super().build(worker, total_steps)
        if self.score_at is None:
            self.score_at = getattr(self.module.config, "score_at", "last_token")
        if self.score_at not in SCORE_AT:
            raise ConfigError(
                f"model.path={self.model_config.path!r}: config.json has "
                f"score_at={self.score_at!r}; valid: {', '.join(SCORE_AT)}."
            )
        self.folder_settings = {"score_at": self.score_at}

    def score_rows(self, data: DataProto, budget: Budget) -> Tensor:
        """[rows]; zero for a row without tokens."""
        scores: Tensor = self.forward_rows(data, budget)["scores"]
        return scores

    def reads(self, columns: RowColumns) -> Ragged:
        """For every token, whether the score is of it."""
        if self.score_at == "legacy_mean":
            ids = columns["input_ids"]
            every: Ragged = ids.with_values(torch.ones(len(ids.values), dtype=torch.bool))
            return every
        return last_token_reads(columns)

    def outputs(self, columns: RowColumns, *_: Any, **__: Any) -> RowColumns:
        """One forward pass: `scores` [rows]."""
        reads = self.reads(columns)
        feed = self.row_passes.feed(columns, reads, self.device)
        numbers = feed.gathered({"": read(self.module, feed)[:, 0].float()})[""]
        rows = to_device(reads.row_of_values()[reads.values], self.device)
        sums = torch.zeros(len(reads), device=self.device).index_add(0, rows, numbers)
        return {"scores": sums / to_device(reads.sums().clamp(min=1), self.device)}
