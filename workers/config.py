"""What workers read of the configuration: typed, torch-free, one docstring under every field.

`trainer.config.schema.PPOConfig` extends `WorkersConfig` with the driver's own sections; every
worker is built as `cls(config)` with the whole tree. Sizes say their unit: a prompt, or a sample
(one of a prompt's `rollout.n` responses).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(kw_only=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule; the scheduler
    steps once per `update_*` call.
    """

    optimizer: str = "AdamW"
    """AdamW, or the dotted path of a class, which gets those of the settings below that its
    constructor knows.
    """
    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Floor of the denominator."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    lr_warmup_steps: int = 0
    """Update calls of linear warm-up from 0 to `lr`."""
    lr_scheduler_type: str = "constant"
    """After the warm-up: constant, cosine or linear."""
    min_lr_ratio: float = 0.0
    """Where cosine and linear end, as a share of `lr`."""
    max_skipped_steps: int = 5
    """Steps in a row with a non-finite gradient that are skipped; one more stops the run."""


@dataclass(kw_only=True)
class FSDPConfig:
    """How a role's module is sharded over its ranks."""

    fsdp_size: int = -1
    """Ranks per sharding group; -1 shards over the whole pool."""
    param_offload: bool | None = None
    """Keep parameters in host memory between calls; null is what the strategy says."""
    optimizer_offload: bool | None = None
    """Keep optimizer state in host memory between updates; null is what the strategy says."""


@dataclass(kw_only=True)
class ModelConfig:
    """A Hugging Face model folder and how it is loaded."""

    path: str = ""
    """Folder of the model and, for the actor, its tokenizer; or its name on the Hugging Face hub.
    """
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    attn_implementation: str = "auto"
    """auto takes the first that runs here of flash_attention_2, sdpa, eager; or one of these."""
    use_remove_padding: bool = True
    """Run rows end to end without their padding, where the model computes that right."""
    dtype: str = "float32"
    """Type that the weights are loaded and trained in."""
    compute_dtype: str | None = None
    """Mixed precision: compute in this type (bfloat16) and add gradients up in float32; null
    computes in `dtype`.
    """
    lora_rank: int = 0
    """Rank of LoRA adapters, which are then all that is trained; 0 trains every weight."""
    lora_alpha: int = 16
    """Adapters count lora_alpha / lora_rank times."""
    target_modules: Any = "all-linear"
    """Layers that get an adapter: all-linear (all but the head), or a list of names such as q_proj.
    """


SAVE_CONTENTS = ("model", "optimizer", "extra", "hf_model")
"""What `checkpoint.save_contents` may name."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """What a role puts into its part of a checkpoint."""

    save_contents: list[str] = field(default_factory=lambda: ["model", "optimizer", "extra"])
    """model, optimizer, extra (schedule and random state): what a resume needs; hf_model: a Hugging
    Face folder.
    """


@dataclass(kw_only=True)
class PolicyLossConfig:
    """Which policy loss."""

    loss_mode: str = "vanilla"
    """A name of the table of policy losses, or the dotted path of a function of the user's."""


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """Importance weights where the rollout engine's probabilities are not the trainer's: decoupled
    PPO, TIS.
    """

    rollout_is: str | None = None
    """token or sequence: what gets one weight; null weighs nothing."""
    rollout_is_threshold: float = 2.0
    """Bound of the weights; 1 or more."""
    rollout_is_mode: str = "truncate"
    """truncate caps weights at the threshold; mask gives zero to those outside [1 / threshold,
    threshold].
    """


@dataclass(kw_only=True)
class ActorConfig:
    """The policy's update."""

    strategy: str = "fsdp"
    """How the model lies over the ranks: single, ddp, fsdp or fsdp_offload."""
    ppo_mini_batch_size: int = 64
    """Prompts per optimizer step, over all ranks; divides `data.train_batch_size`."""
    ppo_micro_batch_size_per_gpu: int = 8
    """Samples per forward and backward pass on one rank; no effect on the result."""
    use_dynamic_bsz: bool = False
    """Cut micro-batches by tokens, not by samples: the actor's, the reference's and those of old
    log-probs.
    """
    ppo_max_token_len_per_gpu: int = 16384
    """Real tokens per forward and backward pass on one rank, under `use_dynamic_bsz`."""
    ppo_epochs: int = 1
    """Passes over the batch per update."""
    clip_ratio: float = 0.2
    """PPO's clip range, both sides."""
    clip_ratio_low: float | None = None
    """Lower clip range; null takes `clip_ratio`."""
    clip_ratio_high: float | None = None
    """Upper clip range; null takes `clip_ratio`."""
    clip_ratio_c: float = 3.0
    """Dual-clip bound for negative advantages; above 1."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """The loss itself."""
    loss_agg_mode: str = "token-mean"
    """How token losses become one number, the critic's too."""
    loss_scale_factor: float | None = None
    """Divisor of seq-mean-token-sum-norm; null takes `data.max_response_length`."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to the reference to the loss; starts the reference role."""
    kl_loss_coef: float = 0.001
    """Weight of that KL."""
    kl_loss_type: str = "low_var_kl"
    """Estimator of that KL."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved."""


@dataclass(kw_only=True)
class RefConfig:
    """The frozen reference policy: the actor's initial weights."""

    log_prob_micro_batch_size_per_gpu: int = 8
    """Samples per forward pass on one rank."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""


@dataclass(kw_only=True)
class ValidationSamplingConfig:
    """How validation samples; greedy by default."""

    n: int = 1
    """Samples per prompt."""
    do_sample: bool = False
    """False decodes greedily."""
    temperature: float = 1.0
    """Divides the logits."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1 takes all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens of this total probability; 1 takes all."""


@dataclass(kw_only=True)
class RolloutConfig:
    """Generation."""

    name: str = "native"
    """Engine."""
    n: int = 1
    """Samples per prompt."""
    temperature: float = 1.0
    """Divides the logits, here and in every log-prob pass."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1 takes all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens of this total probability; 1 takes all."""
    do_sample: bool = True
    """False decodes greedily."""
    max_num_seqs: int = 256
    """Samples decoded together on one rank."""
    kv_cache_gb: float = 4.0
    """Most memory of keys and values on one rank, in GiB; native and vllm on CPUs."""
    sampling_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further sampling settings: min_p, min_tokens, stop_strings, logit_bias (id -> number),
    truncated_log_probs.
    """
    update_weights_bucket_megabytes: float = 16.0
    """Weights travel to the rollout in pieces of about this size."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """vllm: further arguments of its LLM class, such as quantization."""
    tensor_model_parallel_size: int = 1
    """vllm: ranks that share one engine; divides the rollout's pool."""
    gpu_memory_utilization: float = 0.5
    """vllm: share of a device's memory that the engine takes."""
    log_prob_micro_batch_size_per_gpu: int = 8
    """Samples per forward pass of the old log-probs on one rank."""
    val_kwargs: ValidationSamplingConfig = field(default_factory=ValidationSamplingConfig)
    """Sampling in validation."""


@dataclass(kw_only=True)
class ActorRolloutRefConfig:
    """The policy in its three roles, one model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Model of all three."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """Training."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""
    ref: RefConfig = field(default_factory=RefConfig)
    """Reference log-probs."""


@dataclass(kw_only=True)
class CriticModelConfig:
    """The critic's model folder; types, attention, packing and LoRA's other settings are the
    actor's model's.
    """

    path: str = ""
    """Folder of the model."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    lora_rank: int = 0
    """Rank of LoRA adapters, which are then all that is trained besides the head; 0 trains every
    weight.
    """
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""


@dataclass(kw_only=True)
class CriticOptimConfig:
    """What the critic's optimizer has of its own; everything else is the actor's `optim`."""

    lr: float = 1e-5
    """Peak learning rate."""
    lr_warmup_steps: int = 0
    """Update calls of linear warm-up from 0 to `lr`."""


@dataclass(kw_only=True)
class CriticConfig:
    """The value model and its update."""

    strategy: str = "fsdp"
    """How the model lies over the ranks: single, ddp, fsdp or fsdp_offload."""
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """Body of the value model; its head starts at zero."""
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    """Optimizer."""
    ppo_mini_batch_size: int | None = None
    """Prompts per optimizer step, over all ranks; null takes the actor's."""
    ppo_micro_batch_size_per_gpu: int = 8
    """Samples per forward and backward pass on one rank; no effect on the result."""
    ppo_max_token_len_per_gpu: int | None = None
    """Real tokens per forward and backward pass on one rank, under the actor's `use_dynamic_bsz`;
    null takes its.
    """
    ppo_epochs: int | None = None
    """Passes over the batch per update; null takes the actor's."""
    cliprange_value: float = 0.5
    """Largest move of a value away from the one before the update."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved."""


@dataclass(kw_only=True)
class OverlongBufferConfig:
    """DAPO's soft punishment of responses that come near `data.max_response_length`."""

    enable: bool = False
    """Punish them."""
    len: int = 0
    """Tokens before the limit over which the punishment grows from 0."""
    penalty_factor: float = 1.0
    """The punishment at the limit."""


@dataclass(kw_only=True)
class ScoringModelConfig:
    """A sequence classifier with one output, on the actor's tokenizer."""

    path: str = ""
    """Its Hugging Face folder."""


@dataclass(kw_only=True)
class UserCodeConfig:
    """A name in a file or module of the user's."""

    path: str = ""
    """A Python file, or a module as one imports it; empty: none."""
    name: str = ""
    """What to take from it."""


@dataclass(kw_only=True)
class RewardFunctionConfig(UserCodeConfig):
    """A reward function:

    (data_source, solution_str, ground_truth, extra_info) -> score, sync or async.
    """

    name: str = "compute_score"
    """What to take from it."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that every call gets besides."""


@dataclass(kw_only=True)
class RewardModelConfig:
    """Scores: rule functions, a reward model, or both."""

    enable: bool = False
    """Score with a model; starts the reward_model role."""
    model: ScoringModelConfig = field(default_factory=ScoringModelConfig)
    """That model."""
    micro_batch_size_per_gpu: int = 8
    """Samples per forward pass of the model on one rank."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    """Punishment of overlong responses."""
    rule_weight: float = 1.0
    """What the rule's score counts beside the model's; 0 leaves the score to the model."""
    default_score: float = 0.0
    """Score of a sample whose rule function raises, returns no finite number, or passes its
    deadline.
    """
    sample_timeout_s: float = 10.0
    """Deadline of the rule function for one sample; a batch gets twelve times that."""


@dataclass(kw_only=True)
class WorkersConfig:
    """The part of the tree that workers read."""

    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    """Policy: training, generation, reference."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Value model."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """Scores."""
    data: Any
    """Workers read `max_prompt_length` and `max_response_length`."""
    trainer: Any
    """Workers read `seed` and `device`."""
    algorithm: Any
    """Workers read `rollout_correction`."""


def critic_model(config: WorkersConfig) -> ModelConfig:
    """The critic's model settings, whole."""
    own = {
        name: value for name, value in vars(config.critic.model).items() if name != "fsdp_config"
    }
    return replace(config.actor_rollout_ref.model, **own)


def critic_optim(config: WorkersConfig) -> OptimConfig:
    """The critic's optimizer settings, whole."""
    return replace(config.actor_rollout_ref.actor.optim, **vars(config.critic.optim))
