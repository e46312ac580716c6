"""The policy in training and its critic: actor, loss, weights, reference, PTX texts, teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import ReadWhen, Section, config_field, unless, when
from workers.config.conditions import (
    REWARDS_TEACH,
    SPLIT_BY_SAMPLES,
    SPLIT_BY_TOKENS,
    VALIDATES_OR_SAVES,
    loss_reads,
    policy_loss_of,
)
from workers.config.model import (
    CheckpointConfig,
    FrozenModelConfig,
    ModelConfig,
    OptimConfig,
    ShardedConfig,
    role_axes,
    role_sharding,
)
from workers.config.rollout import RolloutConfig

LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum",
)
"""Ways to reduce token losses to one number."""
SHUFFLE_SEED = 42
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3_unclamped", "k3_swapped")
KL_ESTIMATORS = (*_KL, *(f"{name}+" for name in _KL))
"""Estimators of the KL divergence; with a trailing +, the gradient is that of k2."""


LOSS_IS_NAMED = ReadWhen(
    "`bypass_mode` is false or `loss_type` is not reinforce",
    lambda policy_loss, run: policy_loss_of(run) == policy_loss.loss_mode,
    "algorithm.rollout_correction.loss_type=reinforce is the loss under bypass_mode",
)
WEIGHS_ROLLOUT = unless("rollout_is")
SEVERAL_PASSES = ReadWhen(
    "`ppo_epochs` > 1, the actor's or the critic's",
    lambda actor, run: max(actor.ppo_epochs, run.critic.ppo_epochs or 1) > 1,
    "an update passes over the batch once (ppo_epochs=1), so there is no later pass to reshuffle",
)
ONE_CLIP_RATIO = ReadWhen(
    "`clip_ratio_low` or `clip_ratio_high` is null",
    lambda actor, _: actor.clip_ratio_low is None or actor.clip_ratio_high is None,
    "clip_ratio_low and clip_ratio_high are both set and replace it",
)
LOSS_CLIPS = loss_reads("clip_ratio")
LOSS_CLIPS_TWICE = loss_reads("clip_ratio_c")
HAS_ENTROPY_BONUS = unless("entropy_coeff", 0)
HAS_REFERENCE = ReadWhen(
    "there is a reference",
    lambda _, run: run.algorithm.use_kl_in_reward or run.actor_rollout_ref.actor.use_kl_loss,
    "this run has no reference. Set algorithm.use_kl_in_reward or "
    "actor_rollout_ref.actor.use_kl_loss",
)


@dataclass(kw_only=True)
class PolicyLossConfig(Section):
    """The choice of a policy loss, and its arguments."""

    loss_mode: str = config_field("vanilla", registry="policy loss", read_when=LOSS_IS_NAMED)
    """Name of the policy loss."""
    args: dict[str, Any] = config_field(
        factory=dict,
        arguments_of="loss_mode",
        allows="arguments of the loss, by its signature",
        read_when=LOSS_IS_NAMED,
    )
    """Arguments of the policy loss, such as `args.dro_beta=0.1`."""


@dataclass(kw_only=True)
class RolloutCorrectionConfig(Section):
    """Correction for samples from another policy: the rollout engine's, or an older one."""

    rollout_is: str | None = config_field(None, choices=("token", "sequence", "geometric"))
    """Importance weights. `token`: per token; `sequence`: the product of the sequence's token
    weights; `geometric`: their geometric mean; null: none. The default is `token` if the rollout's
    weights are older or rounded.
    """
    rollout_is_threshold: str = config_field(
        "2.0", allows="a number, or lower_upper such as 0.5_5.0", read_when=WEIGHS_ROLLOUT
    )
    """One number truncates larger weights; lower_upper sets weights outside this range to zero."""
    rollout_is_batch_normalize: bool = config_field(False, read_when=WEIGHS_ROLLOUT)
    """Divide weights by their mean over the batch."""
    rollout_rs: str | None = config_field(
        None, allows="token_k1, seq_mean_k1, seq_max_k3, … (see Algorithms)"
    )
    """Criteria that remove tokens or sequences from the loss, separated by commas, in quotes. null
    disables rejection.
    """
    rollout_rs_threshold: str | None = config_field(
        None,
        allows="a number, or for k1 lower_upper such as 0.5_2.0",
        read_when=unless("rollout_rs"),
    )
    """Largest allowed k2 or k3; for k1, the range of the ratio rollout / actor (one number u: 1/u
    to u). One value for all criteria, or one for each.
    """
    rollout_token_veto_threshold: float | None = config_field(
        None, above=0, hint="or null for no veto"
    )
    """Reject sequences with a token whose ratio, actor / rollout, is below this; null: no veto."""
    bypass_mode: bool = config_field(False)
    """Use the rollout's log-probs as old log-probs."""
    loss_type: str = config_field(
        "ppo_clip", choices=("ppo_clip", "reinforce"), read_when=when("bypass_mode")
    )
    """Loss in bypass mode. `ppo_clip`: the loss in `policy_loss.loss_mode`; `reinforce`: weighted
    REINFORCE.
    """

    @property
    def has_importance_weights(self) -> bool:
        """True if importance weights are applied."""
        return self.rollout_is is not None

    @property
    def rejects_tokens(self) -> bool:
        """True if the correction can remove tokens from the mask."""
        return self.rollout_rs is not None or self.rollout_token_veto_threshold is not None


@dataclass(kw_only=True)
class RouterReplayConfig(Section):
    """How a mixture of experts routes tokens in the actor's passes."""

    mode: str = config_field(
        "disabled",
        choices=("disabled", "R3"),
        hint="the rollout's choices (R2, the actor's own of an earlier pass, is not here)",
    )
    """`R3`: the actor uses the experts that the rollout's routers chose; `disabled`: its routers
    choose again.
    """


@dataclass(kw_only=True)
class ActorConfig(ShardedConfig):
    """The update of the policy: mini-batches, loss, optimizer and checkpoints."""

    ppo_mini_batch_size: int = config_field(64, above=0)
    """Size of a mini-batch (one optimizer step, all ranks together) in prompts: it has `rollout.n`
    times as many samples. Must divide `data.train_batch_size`; by default, its largest divisor up
    to 64.
    """
    ppo_micro_batch_size_per_gpu: int = config_field(
        8, above=0, read_when=SPLIT_BY_SAMPLES, may_change_on_resume=True
    )
    """Samples per micro-batch and rank."""
    use_dynamic_bsz: bool = config_field(True, may_change_on_resume=True)
    """Limit micro-batches by tokens instead of samples. Setting `ppo_micro_batch_size_per_gpu` or
    `log_prob_micro_batch_size_per_gpu` turns this off.
    """
    ppo_max_token_len_per_gpu: int | None = config_field(
        None,
        allows="at least prompt and response",
        read_when=SPLIT_BY_TOKENS,
        may_change_on_resume=True,
    )
    """Tokens per micro-batch and rank; null: as many as fit in memory, at most 16,384 (or one row,
    if it is longer).
    """
    ppo_epochs: int = config_field(1, above=0)
    """Epochs over the batch in each update."""
    shuffle: bool = config_field(False, read_when=SEVERAL_PASSES)
    """Reshuffle the mini-batches of actor and critic in each of the `ppo_epochs`."""
    clip_ratio: float = config_field(0.2, above=0, read_when=(ONE_CLIP_RATIO, LOSS_CLIPS))
    """Clip range of the probability ratio, below and above 1. `geo_mean` clips the log-ratio
    instead, below and above 0; `dppo_tv` limits the change of a token's probability, and `dppo_kl`
    its KL.
    """
    clip_ratio_low: float | None = config_field(None, at_least=0, read_when=LOSS_CLIPS)
    """Lower clip range; null: `clip_ratio`."""
    clip_ratio_high: float | None = config_field(None, at_least=0, read_when=LOSS_CLIPS)
    """Upper clip range; null: `clip_ratio`."""
    clip_ratio_c: float = config_field(3.0, above=1, read_when=LOSS_CLIPS_TWICE)
    """Dual clip. For an advantage A < 0, the largest loss is this number times -A. In `dppo_tv` and
    `dppo_kl`, it is the largest ratio in the loss, for any A.
    """
    policy_loss: PolicyLossConfig = config_field(factory=PolicyLossConfig)
    """Choice of the policy loss, and its arguments."""
    loss_agg_mode: str = config_field("token-mean", choices=LOSS_AGG_MODES)
    """How token losses are reduced to a scalar."""
    loss_scale_factor: float | None = config_field(
        None, above=0, read_when=when("loss_agg_mode", "seq-mean-token-sum-norm")
    )
    """Divisor in `seq-mean-token-sum-norm`; null: `data.max_response_length`."""
    entropy_coeff: float = config_field(0.0, at_least=0)
    """Weight of the entropy bonus."""
    target_entropy: float | None = config_field(None, above=0, read_when=HAS_ENTROPY_BONUS)
    """Entropy per token, in nats, that the weight of the entropy bonus adapts to reach; null: none.
    """
    use_kl_loss: bool = config_field(False)
    """Add the KL to the reference to the loss."""
    kl_loss_coef: float = config_field(0.001, at_least=0, read_when=when("use_kl_loss"))
    """Weight of the KL in the loss."""
    kl_loss_type: str = config_field(
        "low_var_kl", choices=KL_ESTIMATORS, read_when=when("use_kl_loss")
    )
    """KL estimator in the loss."""
    ema_decay: float | None = config_field(None, at_least=0, below=1, read_when=VALIDATES_OR_SAVES)
    """Decay of the moving average of the weights, which validation and `export --average` use;
    null disables the average.
    """
    router_aux_loss_coef: float = config_field(0.0, at_least=0)
    """Weight of the load-balancing loss of a mixture of experts."""
    router_replay: RouterReplayConfig = config_field(factory=RouterReplayConfig)
    """Routing of a mixture of experts."""
    grad_clip: float = config_field(1.0, above=0)
    """Gradients are clipped to this norm."""
    optim: OptimConfig = config_field(factory=OptimConfig)
    """Optimizer, learning rate and schedule."""
    fsdp_config: dict[str, Any] = role_sharding()
    """FSDP settings that add to `strategy`, without contradicting it."""
    parallel: dict[str, Any] = role_axes()
    """Parallel axes of the actor that override the run's `parallel`."""
    checkpoint: CheckpointConfig = config_field(factory=CheckpointConfig)
    """What the actor saves in a checkpoint."""


ROUTING_KEY = "actor_rollout_ref.actor.router_replay.mode=R3"
"""The setting of `replays_routing`, for messages."""


def replays_routing(policy: Any) -> bool:
    """True if there is an actor whose tokens go to the experts that the rollout chose."""
    actor = getattr(policy, "actor", None)
    return actor is not None and actor.router_replay.mode == "R3"


def shuffle_seed(actor: ActorConfig) -> int | None:
    """Return the seed by which actor and critic shuffle mini-batches; None without shuffling."""
    return SHUFFLE_SEED if actor.shuffle else None


@dataclass(kw_only=True)
class RefModelConfig(Section):
    """The weights of the reference."""

    path: str | None = config_field(None, allows="a folder or a name", hint="or null")
    """Model folder or hub name, with the actor's tokenizer; null: the actor's initial model."""


@dataclass(kw_only=True)
class RefConfig(FrozenModelConfig):
    """The reference policy: the actor's initial weights, or `model.path`.

    It is frozen unless `update_every` is set.
    """

    log_prob_micro_batch_size_per_gpu: int = config_field(
        8, above=0, read_when=SPLIT_BY_SAMPLES, may_change_on_resume=True
    )
    """Samples per forward pass and rank."""
    model: RefModelConfig = config_field(factory=RefModelConfig)
    """The weights of the reference."""
    update_every: int | None = config_field(None, above=0)
    """Steps between copies of the actor's weights into the reference; null disables the copies."""
    ema_decay: float = config_field(0.0, at_least=0, below=1, read_when=unless("update_every"))
    """Weight of the old reference in each update; 0 copies the actor's weights."""


@dataclass(kw_only=True)
class ActorRolloutRefConfig(Section):
    """The policy: one model, in the roles of actor, rollout and reference."""

    model: ModelConfig = config_field(factory=ModelConfig)
    """The model that actor, rollout and reference share: folder, precision, LoRA."""
    actor: ActorConfig = config_field(factory=ActorConfig)
    """The update of the policy: mini-batches, loss and optimizer."""
    rollout: RolloutConfig = config_field(factory=RolloutConfig)
    """Engine, sampling and memory of the generation."""
    ref: RefConfig = config_field(factory=RefConfig, read_when=HAS_REFERENCE)
    """Reference model for the KL."""


@dataclass(kw_only=True)
class PTXConfig(Section):
    """Rows whose language-model loss is trained with the policy's: InstructGPT's PPO-ptx."""

    train_files: Any = config_field("", allows="a file, or a list")
    """Files of texts, prompts with responses, or chats."""
    coef: float = config_field(1.0, at_least=0)
    """Weight of this loss."""
    batch_size: int | None = config_field(None, above=0, hint="or null")
    """Rows per optimizer step, over all ranks; null: `ppo_mini_batch_size`."""
    max_length: int | None = config_field(None, above=1, hint="or null")
    """Longest row in tokens; null: `data.max_prompt_length` + `data.max_response_length`."""


@dataclass(kw_only=True)
class TeacherModelConfig(FrozenModelConfig):
    """The teacher; dtypes, attention and packing are the actor's."""

    model_path: str = config_field("", allows="a folder or a name")
    """Model folder or hub name, with the actor's tokenizer."""


@dataclass(kw_only=True)
class DistillationConfig(Section):
    """The policy learns from a teacher: log p(teacher) - log p(policy) is a token's reward."""

    teacher_model: TeacherModelConfig = config_field(factory=TeacherModelConfig)
    """The teacher, which has its own role."""
    gamma: float = config_field(0.0, at_least=0, at_most=1)
    """Discount of later tokens' rewards; 1 minimizes the KL of whole responses."""
    use_task_rewards: bool = config_field(
        False, verl="distillation.distillation_loss.use_task_rewards"
    )
    """Train on rewards, too; otherwise they are only logged."""
    coef: float = config_field(
        1.0,
        at_least=0,
        read_when=REWARDS_TEACH,
        verl="distillation.distillation_loss.distillation_loss_coef",
    )
    """Weight of the teacher's advantages relative to the estimator's."""


@dataclass(kw_only=True)
class CriticModelConfig(Section):
    """The critic's model; dtypes, attention, packing and LoRA's other settings are the actor's."""

    path: str = config_field("", allows="a folder or a name")
    """Folder or hub name of a language model or a reward model; by default the actor's."""
    enable_gradient_checkpointing: bool | int | None = config_field(
        None, at_least=0, may_change_on_resume=True
    )
    """Recompute activations in the backward pass, as in `actor_rollout_ref.model`."""
    lora_rank: int = config_field(0, at_least=0)
    """LoRA rank; 0 trains all weights. The head is always trained."""
    fsdp_config: dict[str, Any] = role_sharding()
    """FSDP settings that add to `critic.strategy`, without contradicting it."""


@dataclass(kw_only=True)
class CriticConfig(ShardedConfig):
    """The value model and its update."""

    model: CriticModelConfig = config_field(factory=CriticModelConfig)
    """Value model. A reward model's head is reused; a new head starts at zero."""
    parallel: dict[str, Any] = role_axes()
    """Parallel axes of the critic that override the run's `parallel`."""
    optim: dict[str, Any] = config_field(factory=lambda: {"lr": 1e-5}, options=OptimConfig)
    """Optimizer settings that override the actor's `optim`, by default `{lr: 1e-5}`."""
    ppo_mini_batch_size: int | None = config_field(
        None, allows="a divisor of `data.train_batch_size`"
    )
    """Size of the critic's mini-batches in prompts; null: the actor's."""
    ppo_micro_batch_size_per_gpu: int = config_field(
        8, above=0, read_when=SPLIT_BY_SAMPLES, may_change_on_resume=True
    )
    """Samples per micro-batch and rank."""
    ppo_max_token_len_per_gpu: int | None = config_field(
        None,
        allows="at least prompt and response",
        read_when=SPLIT_BY_TOKENS,
        may_change_on_resume=True,
    )
    """Tokens per micro-batch and rank; null: the actor's."""
    ppo_epochs: int | None = config_field(None, above=0, hint="or null for the actor's")
    """Epochs over the batch in each update; null: the actor's."""
    cliprange_value: float = config_field(0.5, above=0)
    """Clip range around the old values, in the value loss."""
    loss_agg_mode: str | None = config_field(None, choices=LOSS_AGG_MODES)
    """How token losses are reduced to a scalar; null: the actor's."""
    grad_clip: float = config_field(1.0, above=0)
    """Gradients are clipped to this norm."""
    checkpoint: CheckpointConfig = config_field(factory=CheckpointConfig)
    """What the critic saves in a checkpoint."""
