"""The whole configuration tree of a PPO run.

The run's own sections come from `RunConfig`, those that workers read from `WorkersConfig`; here are
the prompts, the algorithm and what PPO adds to the section `trainer`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from trainer.config.schema import RunConfig, TrainerConfig
from trainer.data.config import DataConfig
from verl_like.config_key import When, key
from verl_like.registry import registry_of
from workers.config import (
    KL_ESTIMATORS,
    RewardFunctionConfig,
    RolloutCorrectionConfig,
    WorkersConfig,
)
from workers.config.conditions import HAS_CRITIC


def estimator_takes(name: str) -> When:
    """The advantage estimator has a parameter of that name."""

    def holds(algorithm: Any, _: Any) -> bool:
        estimator = registry_of("advantage estimator").look_up(algorithm.adv_estimator)
        return name in inspect.signature(estimator).parameters

    return When(f"the estimator takes `{name}`", holds, "algorithm.adv_estimator does not take it")


KL_IN_REWARD = When(
    "`use_kl_in_reward`",
    lambda algorithm, _: algorithm.use_kl_in_reward,
    "algorithm.use_kl_in_reward is false",
)
KL_ADAPTS = When(
    "`type` is adaptive",
    lambda kl_ctrl, _: kl_ctrl.type == "adaptive",
    "kl_ctrl.type is not adaptive",
)
FILTERS_GROUPS = When(
    "`enable`",
    lambda filter_groups, _: filter_groups.enable,
    "algorithm.filter_groups.enable is false",
)
NO_FILES = "there are no data.val_files"
CAN_VALIDATE_LATER = When(
    "there are `data.val_files`",
    lambda trainer, run: bool(run.data.val_files) or trainer.test_freq <= 0,
    NO_FILES,
)
CAN_VALIDATE_BEFORE = When(
    "there are `data.val_files`",
    lambda trainer, run: bool(run.data.val_files) or not trainer.val_before_train,
    NO_FILES,
)


@dataclass(kw_only=True)
class KLControlConfig:
    """The coefficient of the KL in the reward."""

    type: str = key("fixed", choices=("fixed", "adaptive"))
    """Whether the coefficient stays, or steers the KL to a target."""
    kl_coef: float = key(0.001, allows="a number")
    """Its (first) value."""
    horizon: int = key(10000, allows="above 0", read_when=KL_ADAPTS)
    """Samples over which the adaptive controller reacts."""
    target_kl: float = key(0.1, allows="above 0", read_when=KL_ADAPTS)
    """What the adaptive controller steers to."""


@dataclass(kw_only=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups of equal scores are replaced by further prompts."""

    enable: bool = key(False)
    """Replace them."""
    metric: str = key(
        "seq_reward", allows="seq_reward or a reward's own number", read_when=FILTERS_GROUPS
    )
    """What must differ: seq_reward (the score), or a number that the reward function returns beside
    it, such as acc.
    """
    max_num_gen_batches: int = key(10, above=0, read_when=FILTERS_GROUPS)
    """Batches generated for one step at most; then groups of equal scores fill what is missing."""


@dataclass(kw_only=True)
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = key("gae", registry="advantage estimator")
    """Advantage estimator; gae is the one that needs the critic."""
    gamma: float = key(1.0, allows="a number", read_when=estimator_takes("gamma"))
    """Discount per token."""
    lam: float = key(1.0, allows="a number", read_when=estimator_takes("lam"))
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = key(True, read_when=estimator_takes("norm_adv_by_std_in_grpo"))
    """Divide GRPO's advantages by their group's standard deviation."""
    filter_groups: FilterGroupsConfig = key(factory=FilterGroupsConfig)
    """Dynamic sampling."""
    score_clip: float | None = key(None, above=0, hint="or null to leave scores as they are")
    """Scores are clamped to -score_clip ... score_clip before anything else; null leaves them."""
    rollout_correction: RolloutCorrectionConfig = key(factory=RolloutCorrectionConfig)
    """Weights and rejection of samples that another policy drew."""
    use_kl_in_reward: bool = key(False)
    """Subtract the KL to the reference from the reward; starts the reference role."""
    kl_penalty: str = key("kl", choices=KL_ESTIMATORS, read_when=KL_IN_REWARD)
    """Estimator of that KL."""
    kl_ctrl: KLControlConfig = key(factory=KLControlConfig, read_when=KL_IN_REWARD)
    """Its coefficient."""


@dataclass(kw_only=True)
class PPOTrainerConfig(TrainerConfig):
    """The run: length, devices, folder."""

    cls: str = key("trainer.ppo.PPOTrainer", allows="a dotted path")
    """Dotted path of the trainer: PPOTrainer, or a subclass that overrides stages or hooks."""
    experiment_name: str = key("ppo", allows="a name", may_change_on_resume=True)
    """Second part of the run folder's name."""
    default_local_dir: str = key("runs/verl_like/ppo", allows="a folder", may_change_on_resume=True)
    """Run folder: configuration, metrics, timeline, rollouts, logs, checkpoints."""
    test_freq: int = key(
        -1,
        above=0,
        or_exactly=-1,
        hint="or -1 for none between steps",
        read_when=CAN_VALIDATE_LATER,
        may_change_on_resume=True,
    )
    """Steps between validations, the last included; -1 validates at most before the first step."""
    val_before_train: bool = key(True, read_when=CAN_VALIDATE_BEFORE, may_change_on_resume=True)
    """Validate before the first step, if there are `data.val_files`."""
    critic_warmup: int = key(0, at_least=0, read_when=HAS_CRITIC)
    """First steps in which only the critic is updated."""


@dataclass(kw_only=True)
class PPOConfig(RunConfig, WorkersConfig):
    """A PPO run."""

    data: DataConfig = key(factory=DataConfig)
    """Prompts."""
    custom_reward_function: RewardFunctionConfig = key(factory=RewardFunctionConfig)
    """Rule rewards by a function of the user's; without one, the rule of each row's data_source."""
    algorithm: AlgorithmConfig = key(factory=AlgorithmConfig)
    """Advantages and KL."""
    trainer: PPOTrainerConfig = key(factory=PPOTrainerConfig)
    """The run."""
