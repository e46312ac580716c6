"""The workers' part of the configuration: typed, torch-free, with a docstring under every field.

A recipe's schema extends `WorkersConfig` with the sections that the driver reads. Every worker is
built as `cls(config)` with the whole configuration. Each field declares its key's range, when the
key is read, and whether it may change on a resume (`verl_like.config_key`). Sizes name their unit:
prompts, or samples (a prompt has `rollout.n` samples).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verl_like.config_key import Section, config_field, unless
from workers.config.conditions import HAS_CRITIC, HAS_TEACHER, has_no_reward
from workers.config.environment import HAS_ENVIRONMENT, EnvironmentConfig, has_environment
from workers.config.model import (
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
    CriticConfig,
    CriticModelConfig,
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
    OverlongPenaltyConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    ScoringConfig,
    UserCodeConfig,
)
from workers.config.rollout import ROLLOUT_ENGINES, RolloutConfig


@dataclass(kw_only=True)
class ScoringSections(Section):
    """Sections about the scores of samples, in runs with and without training."""

    reward: ScoringConfig = config_field(factory=ScoringConfig)
    """Settings for all rewards."""
    environment: EnvironmentConfig = config_field(
        factory=EnvironmentConfig, read_when=HAS_ENVIRONMENT
    )
    """The environment of a policy that acts in several turns."""


@dataclass(kw_only=True)
class WorkersConfig(ScoringSections):
    """Sections of the configuration that workers read."""

    actor_rollout_ref: ActorRolloutRefConfig = config_field(factory=ActorRolloutRefConfig)
    """The policy: its model, training, generation and reference."""
    critic: CriticConfig = config_field(factory=CriticConfig, read_when=HAS_CRITIC)
    """The value model: its weights, update and optimizer."""
    parallel: ParallelConfig = config_field(factory=ParallelConfig)
    """Sizes of the parallel axes, for all roles except the rollout and the reward models."""
    ptx: PTXConfig = config_field(factory=PTXConfig, read_when=unless("ptx.train_files", ""))
    """A language-model loss in addition to the policy loss."""
    distillation: DistillationConfig = config_field(
        factory=DistillationConfig, read_when=HAS_TEACHER
    )
    """A teacher's log-probs as token rewards."""
    data: Any
    """Workers read the maximum lengths of prompt and response, and `apply_chat_template_kwargs`."""
    trainer: Any
    """Workers read `seed`."""
    algorithm: Any
    """Workers read `rollout_correction`."""

    def axes(self, overrides: Mapping[str, Any]) -> ParallelConfig:
        """Return the parallel axes of a role with these overrides."""
        return replace(self.parallel, **overrides)


def critic_model(config: WorkersConfig) -> ModelConfig:
    """Return the critic's complete model settings."""
    settings = dict(vars(config.critic.model))
    del settings["fsdp_config"]
    model = replace(config.actor_rollout_ref.model, **settings)
    return model if model.lora_rank > 0 else replace(model, quantization=None)


def teacher_model(config: WorkersConfig) -> ModelConfig:
    """Return the teacher's complete model settings."""
    path = config.distillation.teacher_model.model_path
    return replace(config.actor_rollout_ref.model, path=path, lora_rank=0)


def reference_model(policy: ActorRolloutRefConfig) -> ModelConfig:
    """Return the reference's complete model settings."""
    path = policy.ref.model.path
    return policy.model if path is None else replace(policy.model, path=path, lora_rank=0)


def is_actors_module(policy: ActorRolloutRefConfig) -> bool:
    """True if the reference, in the actor's process, is the actor's module without its adapters."""
    return policy.model.lora_rank > 0 and policy.ref.model.path is None


def critic_optim(config: WorkersConfig) -> OptimConfig:
    """Return the critic's complete optimizer settings."""
    return replace(config.actor_rollout_ref.actor.optim, **config.critic.optim)


def reward_configs(config: ScoringSections) -> list[RewardConfig]:
    """Return `reward.list`, or the rewards of `reward.function` and `reward.model`.

    If `environment.path` or `environment.paths` is set, the environment's reward is added. Without
    an environment, `reward.list` and `reward.function.path`, each row's data_source names a
    built-in rule, unless `reward.function.weight=0` leaves the score to a model, or no reward is
    needed (`has_no_reward`).
    """
    rewards = []
    if config.environment.path or config.environment.paths:
        rewards.append(RewardConfig(name="environment", kind="environment", on_failure="skip"))
    settings = config.reward
    if settings.list or has_no_reward(config):
        return [*settings.list, *rewards]

    function, model = settings.function, settings.model
    by_source = not rewards and (not model.enable or settings.function.weight != 0)
    if function.path or by_source:
        rule = RewardConfig(
            name="function",
            weight=settings.function.weight if model.enable else 1.0,
            score_on_failure=settings.score_on_failure,
            timeout_s=settings.timeout_s,
            path=function.path,
            function=function.name,
            kwargs=function.kwargs,
        )
        rewards.append(rule)

    if model.enable:
        rewards.append(
            RewardConfig(
                name="model",
                kind="model",
                path=model.path,
                quantization=model.quantization,
                micro_batch_size_per_gpu=model.micro_batch_size_per_gpu,
            )
        )
    return rewards


def scores_by_rule(config: ScoringSections) -> bool:
    """True if a reward is the built-in rule of each row's data_source."""
    return any(reward.kind == "function" and not reward.path for reward in reward_configs(config))


def model_rewards(config: ScoringSections) -> dict[str, RewardConfig]:
    """Return the model rewards by the role that loads each; the first role is `reward_model`."""
    models = [reward for reward in reward_configs(config) if reward.kind == "model"]
    roles = ["reward_model", *(f"reward_model_{reward.name}" for reward in models[1:])]
    return dict(zip(roles, models, strict=False))


LARGEST_PASS = 16384
"""Default limit on the tokens of a pass; a longer row raises it to its own length."""


def fewest_tokens_per_pass(config: WorkersConfig) -> int:
    """Return the length of the longest row that a pass must fit: a sample, or a PTX row."""
    sample: int = config.data.max_prompt_length + config.data.max_response_length
    text = config.ptx.max_length if config.ptx.train_files else None
    return max(sample, text or 0)


def tokens_per_pass(config: WorkersConfig) -> int:
    """Return the actor's `ppo_max_token_len_per_gpu`, or its default if it is null."""
    limit = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    return limit or max(LARGEST_PASS, fewest_tokens_per_pass(config))
