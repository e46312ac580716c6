"""A training engine whose model gives one number for a row: reward models, frozen or in training.

    engine = ScoreEngine(model_config, fsdp_config, head="score")
    engine.build(worker)
    scores = engine.score_rows(data, Budget(rows=8))        # [rows]

Where the score is read stands in `config.json` of the model's folder, as `score_at`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from workers.training.engine import TrainEngine
from workers.training.microbatch import Budget
from workers.training.readings import RowScores

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto


class ScoreEngine(TrainEngine):
    """Reads a row's score from the scalar head; padding is never looked at."""

    def __init__(self, *args: Any, score_at: str | None = None, **settings: Any) -> None:
        super().__init__(*args, reading=RowScores(score_at), **settings)

    def score_rows(self, data: DataProto, budget: Budget) -> Tensor:
        """Return [rows]; zero for a row without tokens."""
        scores: Tensor = self.forward_rows(data, budget)["scores"]
        return scores
