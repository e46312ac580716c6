"""What workers read of the configuration: typed, torch-free, one docstring under every field.

A recipe's schema extends `WorkersConfig` with the driver's own sections; every worker is built as
`cls(config)` with the whole tree. The rules of a key (range, when it is read, whether a resume may
change it) stand at its field (`verl_like.config_key`). Sizes say their unit: a prompt, or a sample
(one of a prompt's `rollout.n` responses).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from verl_like.config_key import key
from workers.config.conditions import HAS_CRITIC, HAS_PTX
from workers.config.critic import CriticConfig, CriticModelConfig, CriticOptimConfig
from workers.config.model import (
    SAVE_CONTENTS,
    STRATEGIES,
    CheckpointConfig,
    FrozenFSDPConfig,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
)
from workers.config.policy import (
    KL_ESTIMATORS,
    LOSS_AGG_MODES,
    ActorConfig,
    ActorRolloutRefConfig,
    PolicyLossConfig,
    RefConfig,
    RolloutCorrectionConfig,
)
from workers.config.ptx import PTXConfig
from workers.config.rewards import (
    OverlongBufferConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    ScoringModelConfig,
    UserCodeConfig,
)
from workers.config.rollout import ENGINES, RolloutConfig, ValidationSamplingConfig

__all__ = [
    "ENGINES",
    "KL_ESTIMATORS",
    "LOSS_AGG_MODES",
    "SAVE_CONTENTS",
    "STRATEGIES",
    "ActorConfig",
    "ActorRolloutRefConfig",
    "CheckpointConfig",
    "CriticConfig",
    "CriticModelConfig",
    "CriticOptimConfig",
    "FSDPConfig",
    "FrozenFSDPConfig",
    "ModelConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PTXConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardFunctionConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "ScoringModelConfig",
    "UserCodeConfig",
    "ValidationSamplingConfig",
    "WorkersConfig",
    "critic_model",
    "critic_optim",
]


@dataclass(kw_only=True)
class WorkersConfig:
    """The part of the tree that workers read."""

    actor_rollout_ref: ActorRolloutRefConfig = key(factory=ActorRolloutRefConfig)
    """Policy: training, generation, reference."""
    critic: CriticConfig = key(factory=CriticConfig, read_when=HAS_CRITIC)
    """Value model."""
    reward_model: RewardModelConfig = key(factory=RewardModelConfig)
    """Scores."""
    ptx: PTXConfig = key(factory=PTXConfig, read_when=HAS_PTX)
    """A language-model loss beside the policy's."""
    data: Any
    """Workers read `max_prompt_length` and `max_response_length`."""
    trainer: Any
    """Workers read `seed` and `device`."""
    algorithm: Any
    """Workers read `rollout_correction`."""


def critic_model(config: WorkersConfig) -> ModelConfig:
    """The critic's model settings, whole."""
    own = dict(vars(config.critic.model))
    del own["fsdp_config"]
    return replace(config.actor_rollout_ref.model, **own)


def critic_optim(config: WorkersConfig) -> OptimConfig:
    """The critic's optimizer settings, whole."""
    return replace(config.actor_rollout_ref.actor.optim, **vars(config.critic.optim))
