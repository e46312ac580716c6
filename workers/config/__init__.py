"""What workers read of the configuration: typed, torch-free, one docstring under every field.

A recipe's schema extends `WorkersConfig` with the driver's own sections; every worker is built as
`cls(config)` with the whole tree. The rules of a key (range, when it is read, whether a resume may
change it) stand at its field (`verl_like.config_key`). Sizes say their unit: a prompt, or a sample
(one of a prompt's `rollout.n` responses).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_like.config_key import Section, key, unless
from workers.config.conditions import HAS_CRITIC, HAS_TEACHER, NO_REWARD_LIST, has_no_reward
from workers.config.critic import CriticConfig, CriticModelConfig
from workers.config.environment import PLAYS, EnvironmentConfig, plays
from workers.config.model import (
    SAVE_CONTENTS,
    STRATEGIES,
    CheckpointConfig,
    FrozenFSDPConfig,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
)
from workers.config.policy import (
    KL_ESTIMATORS,
    LOSS_AGG_MODES,
    ActorConfig,
    ActorRolloutRefConfig,
    DistillationConfig,
    PolicyLossConfig,
    PTXConfig,
    RefConfig,
    RolloutCorrectionConfig,
    TeacherModelConfig,
    replays_routing,
    shuffle_seed,
)
from workers.config.rewards import (
    OverlongBufferConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    ScoringConfig,
    ScoringModelConfig,
    UserCodeConfig,
)
from workers.config.rollout import ENGINES, RolloutConfig, ValidationSamplingConfig


@dataclass(kw_only=True)
class ScoringSections(Section):
    """What says how samples are scored, in a run that trains and in one that does not."""

    rewards: list[RewardConfig] = key(factory=list, allows="a list of sections")
    """Weighted rewards, instead of the two sections below."""
    custom_reward_function: RewardFunctionConfig = key(
        factory=RewardFunctionConfig, read_when=NO_REWARD_LIST
    )
    """Your reward function. Without one, a row's data_source names a built-in rule."""
    reward_model: RewardModelConfig = key(factory=RewardModelConfig)
    """Reward model, and how its score is combined with the rule's."""
    reward: ScoringConfig = key(factory=ScoringConfig)
    """Failures and limits of reward functions."""
    environment: EnvironmentConfig = key(factory=EnvironmentConfig, read_when=PLAYS)
    """The environment of a policy that acts in several turns."""


@dataclass(kw_only=True)
class WorkersConfig(ScoringSections):
    """The part of the tree that workers read."""

    actor_rollout_ref: ActorRolloutRefConfig = key(factory=ActorRolloutRefConfig)
    """Policy: training, generation, reference."""
    critic: CriticConfig = key(factory=CriticConfig, read_when=HAS_CRITIC)
    """Value model."""
    parallel: ParallelConfig = key(factory=ParallelConfig)
    """How the ranks of every role share its model."""
    ptx: PTXConfig = key(factory=PTXConfig, read_when=unless("ptx.train_files", ""))
    """A language-model loss in addition to the policy loss."""
    distillation: DistillationConfig = key(factory=DistillationConfig, read_when=HAS_TEACHER)
    """Distillation: a teacher's log-probs as token rewards."""
    data: Any
    """Workers read the longest lengths, and the variables of the chat template."""
    trainer: Any
    """Workers read `seed` and `device`."""
    algorithm: Any
    """Workers read `rollout_correction`."""

    def axes(self, own: Mapping[str, Any]) -> ParallelConfig:
        """Return the axes of a role that has some of its own."""
        return replace(self.parallel, **own)


def critic_model(config: WorkersConfig) -> ModelConfig:
    """The critic's model settings, whole."""
    own = dict(vars(config.critic.model))
    del own["fsdp_config"]
    return replace(config.actor_rollout_ref.model, **own)


def teacher_model(config: WorkersConfig) -> ModelConfig:
    """The teacher's model settings, whole."""
    path = config.distillation.teacher_model.model_path
    return replace(config.actor_rollout_ref.model, path=path, lora_rank=0)


def reference_model(policy: ActorRolloutRefConfig) -> ModelConfig:
    """The reference's model settings, whole."""
    path = policy.ref.model.path
    return policy.model if path is None else replace(policy.model, path=path, lora_rank=0)


def is_actors_module(policy: ActorRolloutRefConfig) -> bool:
    """Whether the reference of the actor's process is the actor's module with its adapters off."""
    return policy.model.lora_rank > 0 and policy.ref.model.path is None


def critic_optim(config: WorkersConfig) -> OptimConfig:
    """The critic's optimizer settings, whole."""
    return replace(config.actor_rollout_ref.actor.optim, **config.critic.optim)


def rewards_of(config: ScoringSections) -> list[RewardConfig]:
    """`rewards`; without that list, what `custom_reward_function` and `reward_model` ask for.

    Those of an environment are added.
    """
    gives = bool(config.environment.path)
    own = [RewardConfig(name="environment", kind="environment", on_failure="skip")] if gives else []
    if config.rewards or has_no_reward(config):
        return [*config.rewards, *own]

    custom, model = config.custom_reward_function, config.reward_model
    found = own
    by_source = not own and (not model.enable or model.rule_weight != 0)
    if custom.path or by_source:
        rule = RewardConfig(
            name="rule",
            weight=model.rule_weight if model.enable else 1.0,
            default_score=model.default_score,
            timeout_s=model.sample_timeout_s,
            path=custom.path,
            function=custom.name,
            kwargs=custom.reward_kwargs,
        )
        found.append(rule)

    if model.enable:
        found.append(
            RewardConfig(
                name="model",
                kind="model",
                path=model.model.path,
                quantization=model.model.quantization,
                micro_batch_size_per_gpu=model.micro_batch_size_per_gpu,
            )
        )
    return found


def scores_by_rule(config: ScoringSections) -> bool:
    """Whether a reward is the rule of each row's data_source."""
    return any(reward.kind == "function" and not reward.path for reward in rewards_of(config))


def model_rewards(config: ScoringSections) -> dict[str, RewardConfig]:
    """Role -> the reward whose model it holds; the first is the role `reward_model`."""
    models = [reward for reward in rewards_of(config) if reward.kind == "model"]
    roles = ["reward_model", *(f"reward_model_{reward.name}" for reward in models[1:])]
    return dict(zip(roles, models, strict=False))
