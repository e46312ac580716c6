"""A new frozen role that scores samples: a class, and its section."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trainer.ppo.config import PPOConfig
from verl_like import DataProto, Dispatch, Worker, register
from verl_like.config_key import config_field
from workers.columns import SEQUENCE_COLUMNS, Column, batch_columns
from workers.training.engine import TrainEngine
from workers.training.microbatch import pass_budget
from workers.training.role_model_spec import RoleModelSpec


@dataclass(kw_only=True)
class JudgeConfig:
    """The judge."""

    path: str = config_field("", allows="a folder")
    """Its model."""
    rows: int = config_field(3, above=0)
    """Samples of a pass."""


@dataclass(kw_only=True)
class ConfigWithJudge(PPOConfig):
    """A PPO run with a judge."""

    judge: JudgeConfig = config_field(factory=JudgeConfig)
    """The judge."""


class JudgeWorker(Worker):
    """Returns the likelihood of every token."""

    is_frozen = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.budget = pass_budget(config, config.judge.rows)
        self.engine = self.role_model(config, self.role).engine(TrainEngine)

    @classmethod
    def role_model(cls, config: Any, role: str) -> RoleModelSpec:
        """Return the folder's model, in the policy's layout."""
        model = replace(config.actor_rollout_ref.model, path=config.judge.path)
        return RoleModelSpec("judge.path", model, rows=config.judge.rows)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model."""
        self.engine.build(self)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, readonly=True)
    @batch_columns(
        reads=SEQUENCE_COLUMNS,
        writes=[Column("judge_log_prob", "[rows, R]", "float32", role="judge")],
        scores=True,
    )
    def compute_judge_log_prob(self, data: DataProto) -> DataProto:
        """Return `judge_log_prob` of the responses."""
        outputs = self.engine.forward_rows(data, self.budget)
        return DataProto.from_dict({"judge_log_prob": outputs["log_probs"]})
