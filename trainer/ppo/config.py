"""The whole configuration tree of a PPO run.

The run's own sections come from `RunConfig`, those that workers read from `WorkersConfig`; here are
the prompts, the algorithm and what PPO adds to the section `trainer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema import HAS_FAULTS, NAME_A_FOLDER, ChaosConfig, RunConfig
from trainer.data.config import DataConfig, ValidatingTrainerConfig
from verl_like.config_key import When, entry_takes, key, when
from workers.config import (
    KL_ESTIMATORS,
    RolloutCorrectionConfig,
    WorkersConfig,
)
from workers.config.conditions import HAS_CRITIC, REWARDS_TEACH, SAVES

NO_STEPS_OR_CRITIC = When(
    "it is 0, or there is a critic",
    lambda section, run: section.critic_warmup == 0 or HAS_CRITIC.holds(section, run),
    HAS_CRITIC.otherwise,
)


def estimator_takes(name: str) -> tuple[When, When]:
    """There is an advantage estimator, and it has a parameter of that name."""
    return REWARDS_TEACH, entry_takes(name, "advantage estimator", "adv_estimator")


@dataclass(kw_only=True)
class KLControlConfig:
    """The coefficient of the KL in the reward."""

    type: str = key("fixed", choices=("fixed", "adaptive"))
    """Whether the coefficient stays, or steers the KL to a target."""
    kl_coef: float = key(0.001, at_least=0)
    """The coefficient, or its first value where it adapts."""
    horizon: int = key(10000, above=0, read_when=when("type", "adaptive"))
    """Samples over which the adaptive controller reacts."""
    target_kl: float = key(0.1, above=0, read_when=when("type", "adaptive"))
    """What the adaptive controller steers to."""


@dataclass(kw_only=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups of equal scores are replaced by further prompts."""

    enable: bool = key(False)
    """Replace groups of equal scores by further prompts."""
    metric: str = key(
        "seq_reward", allows="seq_reward or a reward's own number", read_when=when("enable")
    )
    """What must differ: seq_reward (the score), or a number that the reward function returns beside
    it, such as acc.
    """
    max_num_gen_batches: int = key(10, above=0, read_when=when("enable"))
    """Batches generated for one step at most; then groups of equal scores fill what is missing."""


@dataclass(kw_only=True)
class PolicyFiltrationConfig:
    """PF-PPO: an update trains on the step's samples drawn anew, with replacement, by score."""

    reweight_method: str = key("pow", choices=("pow", "max_min", "max_random"))
    """Chance of a sample: pow: its score's size to a power; max_min: the step's highest and lowest
    scores alone; max_random: the highest four times as likely as any other.
    """
    weight_pow: float = key(2.0, at_least=0, read_when=when("reweight_method", "pow"))
    """The power of pow: 0 takes all samples alike."""


@dataclass(kw_only=True)
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = key("gae", registry="advantage estimator", read_when=REWARDS_TEACH)
    """Advantage estimator; gae is the one that needs the critic."""
    gamma: float = key(1.0, at_least=0, at_most=1, read_when=estimator_takes("gamma"))
    """Discount per token."""
    lam: float = key(1.0, at_least=0, at_most=1, read_when=estimator_takes("lam"))
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = key(True, read_when=estimator_takes("norm_adv_by_std_in_grpo"))
    """Divide GRPO's advantages by their group's standard deviation."""
    bootstrap_truncated: bool = key(False, read_when=estimator_takes("truncated"))
    """A response that hit the length limit ends in its last value, as if it went on, not in 0."""
    gdpo_reward_keys: list[str] = key(
        factory=list,
        allows="seq_reward (the score) and numbers that the reward function returns beside it",
        read_when=estimator_takes("named_rewards"),
    )
    """Rewards that GDPO compares each by itself."""
    gdpo_reward_weights: list[float] | None = key(
        None,
        allows="a number for each of `gdpo_reward_keys`",
        read_when=estimator_takes("gdpo_reward_weights"),
    )
    """What each of them counts; null counts each once."""
    running_norm: list[str] = key(factory=list, choices=("rewards", "advantages"))
    """What is normalised by its mean and standard deviation over all steps so far: samples' scores,
    tokens' advantages (then they are not whitened over the batch).
    """
    use_pf_ppo: bool = key(False)
    """Draw the samples of an update anew by their scores."""
    pf_ppo: PolicyFiltrationConfig = key(
        factory=PolicyFiltrationConfig, read_when=when("use_pf_ppo")
    )
    """How chances follow from scores."""
    filter_groups: FilterGroupsConfig = key(factory=FilterGroupsConfig)
    """Dynamic sampling."""
    score_clip: float | None = key(None, above=0, hint="or null to leave scores as they are")
    """Scores are clamped to -score_clip ... score_clip before anything else; null leaves them."""
    mask_truncated: bool = key(False)
    """Overlong filtering: samples cut by `data.max_response_length` leave the losses of actor and
    critic, and their denominators. Their scores still count in their groups.
    """
    rollout_correction: RolloutCorrectionConfig = key(factory=RolloutCorrectionConfig)
    """Weights and rejection of samples that another policy drew."""
    use_kl_in_reward: bool = key(False)
    """Subtract the KL to the reference from the reward; starts the reference role."""
    kl_penalty: str = key("kl", choices=KL_ESTIMATORS, read_when=when("use_kl_in_reward"))
    """Estimator of the KL in the reward."""
    kl_penalty_per: str = key(
        "token", choices=("token", "sequence"), read_when=when("use_kl_in_reward")
    )
    """token: each token's reward loses the token's KL; sequence: that of the last token loses the
    mean KL of the response.
    """
    kl_ctrl: KLControlConfig = key(factory=KLControlConfig, read_when=when("use_kl_in_reward"))
    """The coefficient of the KL in the reward."""


@dataclass(kw_only=True)
class PPOTrainerConfig(ValidatingTrainerConfig):
    """The run: length, devices, folder."""

    cls: str = key("trainer.ppo.PPOTrainer", allows="a dotted path", may_change_on_resume=False)
    """Dotted path of the trainer: PPOTrainer, or a subclass that overrides stages or hooks."""
    experiment_name: str = key("ppo", allows="a name")
    """Second part of the run folder's name."""
    default_local_dir: str = key("runs/verl_like/ppo", allows="a folder", required=NAME_A_FOLDER)
    """Run folder: configuration, metrics, timeline, rollouts, logs, checkpoints."""
    critic_warmup: int = key(
        0, at_least=0, read_when=NO_STEPS_OR_CRITIC, may_change_on_resume=False
    )
    """First steps in which only the critic is updated."""
    max_rollouts_to_keep: int | None = key(100, at_least=1, hint="or null to keep all")
    """Newest steps whose samples stay whole in `rollouts/` and `validation/`; of older ones 2 kB of
    each stay.
    """
    max_batches_to_keep: int = key(0, at_least=0, hint="0 keeps none", read_when=SAVES)
    """Newest steps whose batches stay in `batches/`, as they went into each stage: what `verl-like
    replay --stage` makes a stage of again, without a generation.
    """


@dataclass(kw_only=True)
class PPOChaosConfig(ChaosConfig):
    """How often which fault comes: chances per step."""

    drop_bucket: float = key(0.0, at_least=0, at_most=1)
    """Chance that the next weight sync after a step's begin loses a bucket on its way."""

    @property
    def has_faults(self) -> bool:
        """Whether a run is to be tried at all."""
        return self.drop_bucket > 0 or super().has_faults


@dataclass(kw_only=True)
class PPOConfig(RunConfig, WorkersConfig):
    """The configuration of a PPO run."""

    data: DataConfig = key(factory=DataConfig)
    """Prompts."""
    algorithm: AlgorithmConfig = key(factory=AlgorithmConfig)
    """Advantages and KL."""
    trainer: PPOTrainerConfig = key(factory=PPOTrainerConfig)
    """The run."""
    chaos: PPOChaosConfig = key(
        factory=PPOChaosConfig, read_when=HAS_FAULTS, may_change_on_resume=True
    )
    """Faults on purpose, to try a run."""

    def of_role(self, role: str) -> PPOConfig:
        """The configuration that this role's workers get: this one."""
        return self

    def reads_in(self, role: str) -> str:
        """The stage of a step in which a role other than the actor reads the samples."""
        return "score"

    def prompts_per_call(self, role: str) -> int:
        """Prompts whose samples a role that only reads or generates has in one call: a batch."""
        return self.data.train_batch_size
