"""A training engine whose model gives one number per row, such as a reward model.

    engine = ScoreTrainEngine(RoleModelSpec("model.path", model_config, head="score"))
    engine.build(worker)
    scores = engine.score_rows(data, MicroBatchBudget(rows=8))        # [rows]

`score_at` in `config.json` of the model's folder sets the position of the score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from workers.training.engine import TrainEngine
from workers.training.microbatch import MicroBatchBudget
from workers.training.readings import RowScores

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto
    from workers.training.role_model import RoleModelSpec


class ScoreTrainEngine(TrainEngine):
    """A training engine that gives one score per row, for example for a reward model.

    Example:

        engine = ScoreTrainEngine(RoleModelSpec("model.path", model_config, head="score"))
        engine.build(worker)                                        # frozen: no optim_config
        scores = engine.score_rows(data, MicroBatchBudget(rows=8))  # [rows]
    """

    def __init__(
        self, model: RoleModelSpec, *, score_at: str | None = None, **settings: Any
    ) -> None:
        """Store the options; `build` loads the model.

        Args:
            model: the role's model, its sharding and its head.
            score_at: the position of the score; None takes `score_at` of the model's config.json.
            settings: keyword arguments of `workers.training.engine.TrainEngine`.
        """
        super().__init__(model, reading=RowScores(score_at), **settings)

    def score_rows(self, data: DataProto, budget: MicroBatchBudget) -> Tensor:
        """Return scores [rows]; zero for a row without tokens."""
        scores: Tensor = self.forward_rows(data, budget)["scores"]
        return scores
