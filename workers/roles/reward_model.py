"""The reward model: a sequence classifier that scores samples.

Rule rewards are the driver's own (`workers.rewards.manager`); with both, the driver adds them up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from verl_like.batch.protocol import DataProto
from verl_like.batch.tensordict_import import TensorDict
from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import ConfigError
from verl_like.process.worker import Worker
from verl_like.tensor_ops.masked import last_places
from workers.config import FSDPConfig, ModelConfig, model_rewards
from workers.models.folder import model_folder
from workers.training.microbatch import Budget
from workers.training.score_engine import ScoreEngine

if TYPE_CHECKING:
    from workers.config import WorkersConfig


class RewardModelWorker(Worker):
    """Scores a prompt with its response by one number, read at the last real token.

    So padding does not change it.
    """

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__()
        models = model_rewards(config)
        self.config = models.get(self.role) or next(iter(models.values()))  # alone, it has no role
        self.policy_path = config.actor_rollout_ref.model.path
        policy = config.actor_rollout_ref.model
        model = ModelConfig(
            path=self.config.path, dtype=policy.dtype, compute_dtype=policy.compute_dtype
        )
        self.budget = Budget(rows=self.config.micro_batch_size_per_gpu)
        self.engine = ScoreEngine(model, FSDPConfig(), head="score")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the classifier, frozen; one on another tokenizer than the actor's is refused."""
        check_same_tokenizer(self.config.path, self.policy_path, self.role)
        self.engine.build(self)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, readonly=True)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores`: the sample's score at its last response token, zero elsewhere.

        An empty response has zeros alone.
        """
        scores = self.engine.score_rows(data, self.budget)
        mask = data.batch["response_mask"] != 0
        last = mask & (torch.arange(mask.shape[1]) == last_places(mask)[:, None])
        return DataProto(
            batch=TensorDict({"rm_scores": scores[:, None] * last}, batch_size=[len(data)])
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Hash of the full weights."""
        return self.engine.weights_checksum()


def check_same_tokenizer(path: str, policy_path: str, role: str) -> None:
    """Refuse a reward model whose token ids are not the policy's.

    Of a folder without a tokenizer nothing can be said.
    """
    own, policy = _vocabulary(path), _vocabulary(policy_path)
    if own is None or policy is None or own == policy:
        return

    tokens = own.keys() | policy.keys()
    other = sorted(token for token in tokens if own.get(token) != policy.get(token))
    raise ConfigError(
        f"the model of role {role!r}, {path!r}, has another tokenizer than "
        f"actor_rollout_ref.model.path={policy_path!r}: {len(other)} tokens differ, such as "
        f"{', '.join(map(repr, other[:3]))}. Responses are not tokenized anew for the reward "
        "model: take one that was trained from the actor's family."
    )


def _vocabulary(path: str) -> dict[str, int] | None:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            model_folder(path, weights=False), local_files_only=True
        )
    except (OSError, ValueError):
        return None
    return dict(tokenizer.get_vocab())
