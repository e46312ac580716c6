"""The reward model: a sequence classifier that scores samples.

The driver computes function rewards (`workers.rewards.manager`), and adds up all configured rewards
by weight.
"""

from __future__ import annotations

import torch

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, register
from verl_like.tensor_ops import last_places
from workers.columns import SEQUENCE_COLUMNS, batch_columns, format_like
from workers.config import ModelConfig, RewardConfig, WorkersConfig, model_rewards
from workers.models.folder import check_same_tokenizer
from workers.roles.model_worker import TRAIN_DISPATCH, ModelWorker
from workers.training.microbatch import MicroBatchBudget, budget_of_actor
from workers.training.role_model_spec import RoleModelSpec
from workers.training.row_scores import ScoreTrainEngine


class RewardModelWorker(ModelWorker):
    """Computes one score of a prompt with its response: the output at the last real token.

    If `config.json` of the model's folder has `score_at: legacy_mean`, the score is the mean over
    all real tokens. Padding has no effect.
    """

    is_frozen = True

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__()
        self.config: RewardConfig = _reward_of(config, self.role)
        self.policy_path = config.actor_rollout_ref.model.path
        rows = self.config.micro_batch_size_per_gpu
        self.budget = budget_of_actor(config) if rows is None else MicroBatchBudget(rows=rows)
        self.engine = ScoreTrainEngine(self.role_model(config, self.role))
        self.split_calls_by(self.engine)

    @classmethod
    def role_model(cls, config: WorkersConfig, role: str) -> RoleModelSpec:
        """Describe the role's classifier, which is frozen."""
        reward, policy = _reward_of(config, role), config.actor_rollout_ref.model
        model = ModelConfig(
            path=reward.path, dtype=policy.dtype, compute_dtype=policy.compute_dtype
        )
        return RoleModelSpec(
            "reward.model.path", model, head="score", quantization=reward.quantization
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int = 0) -> None:
        """Load the frozen classifier; reject it if its tokenizer differs from the actor's.

        A folder without a tokenizer is accepted.
        """
        check_same_tokenizer(self.config.path, self.policy_path, self.role)
        super().init_model(total_steps)

    @register(dispatch_mode=TRAIN_DISPATCH, readonly=True)
    @batch_columns(reads=SEQUENCE_COLUMNS)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Return `rm_scores`: the sample's score at its last response token, zero elsewhere.

        The row of an empty response is all zeros, so its score is lost.
        """
        scores = self.engine.score_rows(data, self.budget)
        mask = data.padded("response_mask") != 0
        last = mask & (torch.arange(mask.shape[1]) == last_places(mask)[:, None])
        rm_scores = format_like(data.column("response_mask"), scores[:, None] * last)
        return DataProto.from_dict({"rm_scores": rm_scores})


def _reward_of(config: WorkersConfig, role: str) -> RewardConfig:
    models = model_rewards(config)
    # a worker that is used without a group has no role name
    return models.get(role) or next(iter(models.values()))
