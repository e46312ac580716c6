"""The configuration tree of a PPO run.

`RunConfig` has the sections about the run, and `WorkersConfig` has the sections that workers read.
This module adds the prompts, the algorithm and PPO's keys of the section `trainer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.config.schema import NAME_A_FOLDER, RunConfig
from trainer.data.config import DataConfig, ValidatingTrainerConfig
from verl_like.config_key import ReadWhen, Section, config_field, entry_takes, when
from workers.config import KL_ESTIMATORS, RolloutCorrectionConfig, WorkersConfig
from workers.config.conditions import HAS_CRITIC, REWARDS_TEACH, SAVES

NO_STEPS_OR_CRITIC = ReadWhen(
    HAS_CRITIC.description,
    lambda section, run: section.critic_warmup == 0 or HAS_CRITIC.condition(section, run),
    HAS_CRITIC.reason,
)


def estimator_takes(name: str) -> tuple[ReadWhen, ReadWhen]:
    """Return the conditions under which an estimator is used and has a parameter of that name."""
    return REWARDS_TEACH, entry_takes(name, "advantage estimator", "adv_estimator")


@dataclass(kw_only=True)
class KLControlConfig(Section):
    """Coefficient of the KL in the reward."""

    type: str = config_field("fixed", choices=("fixed", "adaptive"))
    """`fixed`: constant; `adaptive`: adapted so that the KL stays near `target_kl`."""
    kl_coef: float = config_field(0.001, at_least=0)
    """Coefficient; with `adaptive`, its first value."""
    horizon: int = config_field(10000, above=0, read_when=when("type", "adaptive"))
    """Samples over which the coefficient adapts; larger values: more slowly."""
    target_kl: float = config_field(0.1, above=0, read_when=when("type", "adaptive"))
    """KL that the controller aims at."""


@dataclass(kw_only=True)
class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: new prompts replace groups of equal scores."""

    enable: bool = config_field(False)
    """Replace groups of equal scores with groups of new prompts."""
    metric: str = config_field(
        "seq_reward",
        allows="seq_reward, or a number that the reward function returns",
        read_when=when("enable"),
    )
    """Number that must differ within a group; seq_reward is the score."""
    max_num_gen_batches: int = config_field(10, above=0, read_when=when("enable"))
    """Maximum batches generated per step; after that, groups with equal scores fill the
    batch.
    """


@dataclass(kw_only=True)
class PolicyFiltrationConfig(Section):
    """PF-PPO: an update resamples the step's samples by score, with replacement."""

    reweight_method: str = config_field("pow", choices=("pow", "max_min", "max_random"))
    """How samples are drawn. `pow`: in proportion to a power of the absolute score; `max_min`: only
    the highest and lowest scores; `max_random`: the highest score four times as often as others.
    """
    weight_pow: float = config_field(2.0, at_least=0, read_when=when("reweight_method", "pow"))
    """Exponent of `pow`; 0 treats all samples alike."""


@dataclass(kw_only=True)
class AlgorithmConfig(Section):
    """Computation of advantages from scores."""

    adv_estimator: str = config_field(
        "gae", registry="advantage estimator", read_when=REWARDS_TEACH
    )
    """Advantage estimator; `gae` and `coati` need a critic."""
    args: dict[str, Any] = config_field(
        factory=dict,
        arguments_of="adv_estimator",
        allows="arguments of the estimator",
        read_when=REWARDS_TEACH,
    )
    """Values for keyword-only parameters of the estimator's function."""
    gamma: float = config_field(1.0, at_least=0, at_most=1, read_when=estimator_takes("gamma"))
    """Discount factor per token."""
    lam: float = config_field(1.0, at_least=0, at_most=1, read_when=estimator_takes("lam"))
    """GAE's lambda: 0 uses one-step errors, 1 the full returns."""
    norm_adv_by_std_in_grpo: bool = config_field(
        True, read_when=estimator_takes("norm_adv_by_std_in_grpo")
    )
    """Divide advantages by the group's standard deviation."""
    adv_epsilon: float | None = config_field(
        None,
        at_least=0,
        hint="or null for the estimator's own",
        read_when=estimator_takes("epsilon"),
    )
    """Added to the standard deviation by which advantages are divided, such as TRL's 1e-4; null:
    1e-6, or the default of your estimator.
    """
    bootstrap_truncated: bool = config_field(False, read_when=estimator_takes("truncated"))
    """Bootstrap truncated responses from their last value."""
    gdpo_reward_keys: list[str] = config_field(
        factory=list,
        allows="seq_reward (the score) and other numbers that the reward function returns",
        read_when=estimator_takes("named_rewards"),
    )
    """Rewards that the estimator `gdpo` normalizes separately."""
    gdpo_reward_weights: list[float] | None = config_field(
        None,
        allows="one number per entry of `gdpo_reward_keys`",
        read_when=estimator_takes("gdpo_reward_weights"),
    )
    """Weights in the sum of `gdpo`; null: 1 for each."""
    running_norm: list[str] = config_field(factory=list, choices=("rewards", "advantages"))
    """Normalize by running statistics. `rewards`: the scores; `advantages`: the advantages, instead
    of whitening.
    """
    use_pf_ppo: bool = config_field(False)
    """Resample each update's samples by score (PF-PPO)."""
    pf_ppo: PolicyFiltrationConfig = config_field(
        factory=PolicyFiltrationConfig, read_when=when("use_pf_ppo")
    )
    """How PF-PPO resamples by score."""
    filter_groups: FilterGroupsConfig = config_field(factory=FilterGroupsConfig)
    """DAPO's dynamic sampling."""
    score_clip: float | None = config_field(
        None, above=0, hint="or null to leave scores as they are"
    )
    """Clamp each score, at the end of a response or a step, to ±score_clip; null: no clamp."""
    mask_truncated: bool = config_field(False)
    """Leave truncated responses out of the losses; their scores still count in their groups."""
    rollout_correction: RolloutCorrectionConfig = config_field(factory=RolloutCorrectionConfig)
    """Importance weights and rejection for off-policy samples."""
    use_kl_in_reward: bool = config_field(False)
    """Subtract the KL to the reference from the reward."""
    kl_penalty: str = config_field("kl", choices=KL_ESTIMATORS, read_when=when("use_kl_in_reward"))
    """KL estimator in the reward."""
    kl_penalty_per: str = config_field(
        "token", choices=("token", "sequence"), read_when=when("use_kl_in_reward")
    )
    """`token`: subtract each token's KL; `sequence`: subtract the mean KL at the last token."""
    kl_ctrl: KLControlConfig = config_field(
        factory=KLControlConfig, read_when=when("use_kl_in_reward")
    )
    """Coefficient of the KL in the reward."""


@dataclass(kw_only=True)
class PPOTrainerConfig(ValidatingTrainerConfig):
    """PPO's keys of the section `trainer`."""

    cls: str = config_field(
        "trainer.ppo.PPOTrainer", allows="a dotted path", may_change_on_resume=False
    )
    """Trainer class: PPOTrainer or a subclass."""
    experiment_name: str = config_field("ppo", allows="a name")
    """Name of the run in W&B and trackio; second part of the default run folder."""
    default_local_dir: str = config_field(
        "runs/verl_like/ppo", allows="a folder", required=NAME_A_FOLDER
    )
    """Folder of the run: its metrics, checkpoints, samples and report."""
    critic_warmup: int = config_field(
        0, at_least=0, read_when=NO_STEPS_OR_CRITIC, may_change_on_resume=False
    )
    """Initial steps that update only the critic."""
    rollout_steps_to_keep: int | None = config_field(100, at_least=1, hint="or null to keep all")
    """Newest steps whose samples are all kept; null: of every step."""
    batch_steps_to_keep: int = config_field(0, at_least=0, hint="0 keeps none", read_when=SAVES)
    """Newest steps whose batches are kept for `replay`."""
    record: str = config_field("0", allows="`all`, or a number of steps", read_when=SAVES)
    """Newest steps whose numbers are kept in `record/` for `bisect`; 0: none."""


@dataclass(kw_only=True)
class PPOConfig(RunConfig, WorkersConfig):
    """The configuration of a PPO run; `verl-like ppo --cfg all` explains its keys.

    Example:

        config = load_config(["data.train_files=a.parquet", "actor_rollout_ref.model.path=m"])
        config.actor_rollout_ref.rollout.n      # 1, a field of a section of `PPOConfig`
    """

    generates_while_training = False
    """True if a rollout generates while the trainer trains."""

    data: DataConfig = config_field(factory=DataConfig)
    """The prompts: their files, number per step, lengths and order."""
    algorithm: AlgorithmConfig = config_field(factory=AlgorithmConfig)
    """How rewards become advantages, and the KL in the reward."""
    trainer: PPOTrainerConfig = config_field(factory=PPOTrainerConfig)
    """Length, devices, checkpoints and logging of the run."""

    @property
    def steps_per_version(self) -> int:
        """Number of steps from one version of the rollout's weights to the next."""
        return 1

    @property
    def steps_per_batch(self) -> int:
        """Number of steps that train on the same samples."""
        return 1
