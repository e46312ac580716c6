"""The reward model in training, on pairs of a better and a worse response.

`workers.roles.reward_model` is the frozen one, which scores PPO's samples.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import register
from workers.config.rows import RewardTrainingConfig
from workers.losses.pairwise import compute_reward_loss, get_pairwise_loss, rank_accuracy
from workers.models.causal_lm import Head
from workers.roles.model_worker import TRAIN
from workers.roles.rows import RowWorker
from workers.training.microbatch import Columns, MiniBatch
from workers.training.readings import Pairs, Reading, RowScores


class RewardTrainingWorker(RowWorker):
    """Learns to score a pair's chosen side above its rejected side, and scores pairs."""

    loss_name = "pairwise"
    config: RewardTrainingConfig
    head: ClassVar[Head] = "scalar"
    loss_columns = ("margin",)

    def __init__(self, config: RewardTrainingConfig) -> None:
        super().__init__(config)
        self.pairwise_loss = get_pairwise_loss(config.loss)

    def reading(self) -> Reading:
        """Return the scores of both sides of pairs."""
        return Pairs(RowScores(self.config.score_at))

    @register(dispatch_mode=TRAIN, readonly=True)
    def compute_scores(self, data: DataProto) -> DataProto:
        """Return the column `scores` [pairs, 2]: of the chosen side, then of the rejected side."""
        scores = self.engine.forward_rows(data, self.budget)["scores"]
        return DataProto.from_dict({"scores": scores})

    def loss(
        self, outputs: Columns, columns: Columns, batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        scores = outputs["scores"]
        losses = compute_reward_loss(
            self.pairwise_loss, scores, columns["margin"], self.config.center_coef
        )
        is_pair = columns["response_mask"].flatten(1).any(dim=1)
        share = is_pair / (batch.num_rows / 2)  # each side of a pair counts as a row
        chosen, rejected = scores.detach().unbind(dim=1)
        means = {
            "loss": losses,
            "accuracy": rank_accuracy(scores.detach()),
            "margin": chosen - rejected,
            "chosen_score": chosen,
            "rejected_score": rejected,
        }
        shares = {name: (values * share).sum() for name, values in means.items()}
        return shares["loss"], shares
