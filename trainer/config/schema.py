"""The whole configuration tree of a PPO run: typed, torch-free, one docstring under every field.

`trainer.config.compose.load_config` fills it from YAML and overrides;
`trainer.config.checks.validate` holds the cross-checks. These dataclasses are the only home of a
default; the YAML files beside them hold nothing but interpolations and placements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl_like.calls.waiting import Deadlines
from workers.config import (
    RewardFunctionConfig,
    RolloutCorrectionConfig,
    UserCodeConfig,
    WorkersConfig,
)


@dataclass(kw_only=True)
class DataConfig:
    """Prompts: files, sizes, order."""

    train_files: Any = ""
    """A parquet or JSONL file in verl's schema, or a list of them."""
    val_files: Any = ""
    """The same for validation; empty: no validation."""
    custom_cls: UserCodeConfig = field(default_factory=UserCodeConfig)
    """A data set of the user's: called with data_files, tokenizer and config, it gives rows of that
    schema.
    """
    prompt_key: str = "prompt"
    """Column of the prompts: chat messages, or plain strings."""
    train_batch_size: int = 1024
    """Prompts per step."""
    max_prompt_length: int = 512
    """Tokens; every prompt is left-padded to it."""
    max_response_length: int = 512
    """Tokens; every response is right-padded to it."""
    shuffle: bool = True
    """A new order each epoch, from `trainer.seed`."""
    filter_overlong_prompts: bool = False
    """Drop (and count) prompts of more than `max_prompt_length` tokens."""
    truncation: str = "error"
    """An overlong prompt that was not dropped: error, or cut it at its left or right end."""
    on_bad_row: str = "error"
    """A row that is no prompt (a missing column, no messages, no tokens): error, or skip it and
    count it.
    """


@dataclass(kw_only=True)
class KLControlConfig:
    """The coefficient of the KL in the reward."""

    type: str = "fixed"
    """fixed or adaptive."""
    kl_coef: float = 0.001
    """Its (first) value."""
    horizon: int = 10000
    """Samples over which the adaptive controller reacts."""
    target_kl: float = 0.1
    """What the adaptive controller steers to."""


@dataclass(kw_only=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: prompts whose samples all score alike are replaced by further
    prompts.
    """

    enable: bool = False
    """Replace them."""
    metric: str = "seq_reward"
    """What must differ: seq_reward (the score), or a number that the reward function returns beside
    it, such as acc.
    """
    max_num_gen_batches: int = 10
    """Batches generated for one step at most; what is still missing then is filled with groups of
    equal scores.
    """


@dataclass(kw_only=True)
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = "gae"
    """Advantage estimator; gae is the one that needs the critic."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by their group's standard deviation."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling."""
    score_clip: float | None = None
    """Scores are clamped to -score_clip ... score_clip before anything else; null leaves them."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Importance weights of the policy loss."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the reward; starts the reference role."""
    kl_penalty: str = "kl"
    """Estimator of that KL."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Its coefficient."""


@dataclass(kw_only=True)
class TrainerConfig:
    """The run: length, devices, folder."""

    cls: str = "trainer.ppo.PPOTrainer"
    """Dotted path of the trainer:

    PPOTrainer, or a subclass of yours that overrides stages or hooks.
    """
    total_epochs: int = 1
    """Passes over the data."""
    total_training_steps: int | None = None
    """Steps; null takes epochs x batches."""
    stop_at: dict[str, float] = field(default_factory=dict)
    """Metric -> value: the run ends with the first step in which one of them is reached."""
    critic_warmup: int = 0
    """First steps in which only the critic is updated."""
    nnodes: int = 1
    """Machines."""
    n_gpus_per_node: int = 1
    """Devices per machine; where there is no GPU, process slots."""
    backend: str = "ray"
    """ray, or local: the same workers without a cluster."""
    device: str = "auto"
    """auto takes GPUs where there are any; cpu; cuda."""
    seed: int = 1
    """Decides data order, sampling and initial heads."""
    project_name: str = "verl_like"
    """First part of the run folder's name."""
    experiment_name: str = "ppo"
    """Second part of the run folder's name."""
    default_local_dir: str = "runs/verl_like/ppo"
    """Run folder: configuration, metrics, timeline, rollouts, logs, checkpoints."""
    test_freq: int = -1
    """Steps between validations, the last step's included; -1 validates at most before the first
    step.
    """
    val_before_train: bool = True
    """Validate before the first step, if there are `data.val_files`."""
    dry_run: bool = False
    """Check everything, print the plan and the batch sizes, and stop before a process starts."""
    save_freq: int = -1
    """Steps between checkpoints, the last step's included; -1 writes none."""
    max_ckpt_to_keep: int | None = None
    """Committed checkpoints that stay in the run folder; null keeps all."""
    resume_mode: str = "auto"
    """auto goes on from the run folder's newest checkpoint, if there is one; disable; resume_path.
    """
    resume_from_path: str | None = None
    """The `global_step_N` folder that resume_mode=resume_path goes on from."""
    logger: list[str] = field(default_factory=lambda: ["console"])
    """Where metrics go besides metrics.jsonl: console, tensorboard, wandb."""


@dataclass(kw_only=True)
class RayConfig:
    """How `trainer.backend=ray` reaches its cluster."""

    address: str | None = None
    """A running cluster to join; null starts one on this machine."""
    namespace: str | None = None
    """Ray's namespace for the run's actors; null takes one of its own."""
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """Passed to `ray.init` as it is."""


@dataclass(kw_only=True)
class RunConfig:
    """What the configuration of every recipe has."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run."""
    ray: RayConfig = field(default_factory=RayConfig)
    """Cluster."""
    watch: dict[str, float] = field(default_factory=Deadlines.settings)
    """The deadline of every kind of wait, in seconds; a wait is logged from the age of warn_s on.
    """
    resource_pool_spec: dict[str, list[int]] = field(default_factory=dict)
    """Pool name -> processes on each of its nodes."""
    role_mapping: dict[str, str] = field(default_factory=dict)
    """Role -> pool name; `actor_rollout` is actor and rollout fused in one process."""
    role_workers: dict[str, str] = field(default_factory=dict)
    """Role -> dotted path of its worker class, where it is not the built-in one."""
    cpus_per_process: float | None = None
    """CPU share of one worker process; null takes min(1, CPUs / processes)."""


@dataclass(kw_only=True)
class PPOConfig(RunConfig, WorkersConfig):
    """A PPO run."""

    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    custom_reward_function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)
    """Rule rewards by a function of the user's; without one, the rule of each row's data_source."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages and KL."""
