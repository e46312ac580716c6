"""A trained model: its folder, sharding, optimizer, and checkpoint contents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import ReadWhen, Section, config_field, entry_takes, unless, when
from workers.config.conditions import SAVES, is_bare_config, may_read_images

STRATEGIES: dict[str, tuple[str, bool]] = {
    "single": ("single", False),
    "ddp": ("ddp", False),
    "fsdp": ("fsdp", False),
    "fsdp+offload": ("fsdp", True),
    "shard_grad_op": ("shard_grad_op", False),
    "shard_grad_op+offload": ("shard_grad_op", True),
    "fsdp_offload": ("fsdp", True),
}
"""Ways to distribute a model over ranks: its sharding, and True if shards and moments are offloaded
to host memory.

fsdp shards weights, gradients and optimizer state, and gathers the weights of a layer for its
forward pass and again for its backward pass (ZeRO-3). shard_grad_op gathers them once per
mini-batch and keeps them whole until the last backward pass; gradients and optimizer state are
still sharded (ZeRO-2). Between calls both store only shards.
"""
STRATEGIES_ELSEWHERE = {
    "naive": "single",
    "no_shard": "ddp",
    "fsdp2": "fsdp",
    "full_shard": "fsdp",
    "zero3": "fsdp",
    "zero2": "shard_grad_op",
    "colossalai_zero2": "shard_grad_op",
    "colossalai_zero2_cpu": "shard_grad_op+offload",
    "colossalai_gemini": "fsdp",
    "colossalai_gemini_cpu": "fsdp+offload",
}
"""Other systems' names for these strategies."""
DTYPES = ("float32", "bfloat16")
"""Dtypes of stored weights and of passes."""
ATTENTIONS = (
    "auto",
    "flash_attention_4",
    "flash_attention_3",
    "flash_attention_2",
    "sdpa",
    "eager",
)
COMPILES = ("auto", "on", "off")
QUANTIZATIONS = ("int8",)
"""Number formats for the linear weights of a role that is not trained."""
BASE_QUANTIZATIONS = ("nf4",)
"""Number formats for the linear weights of a frozen base under adapters."""
PP_SCHEDULES = ("1f1b", "gpipe", "interleaved")
SAVE_CONTENTS = ("model", "optimizer", "extra", "hf_model")
"""Allowed names in `checkpoint.save_contents`."""
IMAGE_BACKEND = "pil"
"""Backend of transformers' image processors. Each has other pixels; this one runs everywhere."""
HAS_LORA = unless("lora_rank", 0)
TOWER_MAY_LEARN = ReadWhen(
    "the model has a vision tower, and `lora_rank` is 0",
    lambda model, _: model.lora_rank == 0 and may_read_images(model.path),
    "the model has no vision tower, or LoRA trains only the language half",
)
HAS_FROZEN_BASE = ReadWhen(
    "`lora_rank` is above 0",
    lambda model, _: model.lora_rank > 0 or model.quantization is not None,  # rejected by a check
    "lora_rank is 0",
)
HAS_STAGES = unless("pp", 1)
HAS_NO_WEIGHTS = ReadWhen(
    "the folder of `path` has no weights",
    lambda model, _: is_bare_config(model.path),
    "the folder of model.path has weights, or is not there",
)
WARMS_UP = unless("lr_warmup_steps", 0)
WARMS_UP_BY_SHARE = when("lr_warmup_steps", -1)


def optimizer_takes(name: str) -> ReadWhen:
    """Return the condition that the optimizer's constructor has a parameter of that name."""
    return entry_takes(name, "optimizer", "optimizer")


def schedule_takes(name: str) -> ReadWhen:
    """Return the condition that the learning-rate schedule has a parameter of that name."""
    return entry_takes(name, "learning-rate schedule", "lr_scheduler_type")


@dataclass(kw_only=True)
class ShardedConfig(Section):
    """How a trained model is distributed over ranks."""

    strategy: str = config_field(
        "fsdp",
        choices=tuple(STRATEGIES),
        elsewhere=STRATEGIES_ELSEWHERE,
        may_change_on_resume=True,
    )
    """How the model is distributed over ranks. `single`, `ddp`: whole on every rank;
    `shard_grad_op`: ZeRO-2; `fsdp`: ZeRO-3; `+offload`: in host memory between calls.
    `fsdp_offload` means `fsdp+offload`.
    """


@dataclass(kw_only=True)
class OptimConfig(Section):
    """The optimizer and its schedule, which steps once per `update_*` call.

    `lr` is the peak learning rate, and `lr_warmup_steps` and `lr_scheduler_type` set its schedule.
    `optimizer` names the optimizer, which gets `weight_decay`, `betas` and `eps` if it has these
    parameters, and the further arguments in `args`. `verl-like ppo --cfg all` explains all keys.

    Example:

        OptimConfig(lr=1e-6, lr_warmup_steps=10, lr_scheduler_type="cosine")
    """

    lr: float = config_field(1e-6, at_least=0)
    """Peak learning rate."""
    lr_warmup_steps: int = config_field(0, at_least=-1, hint="where -1 uses lr_warmup_steps_ratio")
    """Linear warm-up in update calls (usually one per training step; not optimizer steps). 0
    disables it; -1: `lr_warmup_steps_ratio` sets it.
    """
    lr_warmup_steps_ratio: float = config_field(
        0.0, at_least=0, at_most=1, read_when=WARMS_UP_BY_SHARE
    )
    """Warm-up as a fraction of all update calls."""
    lr_warmup_init_ratio: float | None = config_field(
        None, at_least=0, at_most=1, hint="or null to rise in equal steps", read_when=WARMS_UP
    )
    """First rate of the warm-up as a fraction of `lr`; 0: the first update changes nothing, as in
    transformers. null: 1/(steps + 1).
    """
    optimizer: str = config_field("AdamW", registry="optimizer")
    """Optimizer, which gets the settings of this section that it accepts. AdamWMatrixDecay decays
    only matrices. Muon steps the matrices of hidden layers at `args.matrix_lr`, and other weights
    as AdamW.
    """
    args: dict[str, Any] = config_field(
        factory=dict, arguments_of="optimizer", allows="arguments of the optimizer"
    )
    """Further arguments of the optimizer, such as `args.momentum=0.9`."""
    betas: tuple[float, float] = config_field(
        (0.9, 0.999), allows="two numbers", read_when=optimizer_takes("betas")
    )
    """Adam's decay rates of the first and the second moment."""
    eps: float = config_field(1e-8, at_least=0, read_when=optimizer_takes("eps"))
    """Adam's epsilon, which is added to the denominator."""
    weight_decay: float = config_field(0.01, at_least=0, read_when=optimizer_takes("weight_decay"))
    """Weight decay (decoupled in AdamW); 0 disables it."""
    lr_scheduler_type: str = config_field("constant", registry="learning-rate schedule")
    """Learning-rate schedule after the warm-up."""
    min_lr_ratio: float = config_field(
        0.0, at_least=0, at_most=1, read_when=schedule_takes("min_lr_ratio")
    )
    """Final learning rate as a fraction of `lr`."""
    wsd_decay_ratio: float = config_field(
        0.1, above=0, at_most=1, read_when=schedule_takes("wsd_decay_ratio")
    )
    """Fraction of the update calls after the warm-up in which `wsd` decays."""


@dataclass(kw_only=True)
class FrozenFSDPConfig(Section):
    """Sharding of a module without an optimizer over its role's ranks."""

    may_change_on_resume = True
    fsdp_size: int = config_field(
        -1, above=0, or_exactly=-1, hint="or -1 for all that the other axes leave"
    )
    """Ranks that shard the weights; -1: all that the other axes leave."""
    param_offload: bool | None = config_field(None)
    """Keep parameters in host memory between calls; null: as `strategy` says."""


@dataclass(kw_only=True)
class FSDPConfig(FrozenFSDPConfig):
    """Sharding of a role's module and its optimizer over its ranks.

    `fsdp_size` is the number of ranks that shard the weights; -1 takes all that the other parallel
    axes leave. `param_offload` and `optimizer_offload` keep weights and optimizer state in host
    memory while they are not needed; by default, the role's `strategy` decides.

    Example:

        FSDPConfig(fsdp_size=4, param_offload=True)
    """

    optimizer_offload: bool | None = config_field(None)
    """Keep optimizer state in host memory between updates; null: as `strategy` says."""


@dataclass(kw_only=True)
class ParallelConfig(Section):
    """Sizes of the axes along which a role's ranks share one model."""

    may_change_on_resume = True
    shard: int = config_field(
        -1, above=0, or_exactly=-1, hint="or -1 for all that the other axes leave"
    )
    """Ranks that shard the weights; -1: all that the other axes leave. The same as `fsdp_size`."""
    sp: int = config_field(1, above=0)
    """Ranks that split the tokens of a row (sequence parallel)."""
    tp: int = config_field(1, above=0)
    """Ranks that split the matrices of a layer (tensor parallel)."""
    pp: int = config_field(1, above=0)
    """Ranks that split the layers (pipeline parallel)."""
    pp_schedule: str = config_field("1f1b", choices=PP_SCHEDULES, read_when=HAS_STAGES)
    """Order of the passes of a pipeline."""
    ep: int = config_field(1, above=0)
    """Ranks that split the experts (expert parallel)."""


def role_axes() -> Any:
    """Return a field for the role's parallel axes, which override the section `parallel`."""
    return config_field(factory=dict, options=ParallelConfig, may_change_on_resume=True)


def role_sharding(options: type[FrozenFSDPConfig] = FSDPConfig) -> Any:
    """Return a field for the role's sharding settings, which add to `strategy`."""
    return config_field(factory=dict, options=options, may_change_on_resume=True)


@dataclass(kw_only=True)
class FrozenModelConfig(Section):
    """Number format and distribution of a model that only computes log-probs."""

    quantization: str | None = config_field(None, choices=QUANTIZATIONS)
    """`int8`: store linear weights as int8, unsharded on each rank; null disables quantization."""
    fsdp_config: dict[str, Any] = role_sharding(FrozenFSDPConfig)
    """FSDP settings that add to the actor's `strategy`, without contradicting it."""
    parallel: dict[str, Any] = role_axes()
    """Parallel axes of this role that override the run's `parallel`."""


@dataclass(kw_only=True)
class ModelConfig(Section):
    """A Hugging Face model folder and how it is loaded.

    `path` is the folder or a name on the hub. `lora_rank` above 0 trains adapters only;
    `enable_gradient_checkpointing` saves memory; `dtype` and `compute_dtype` are the dtypes of the
    weights and of the passes. `verl-like ppo --cfg all` explains all keys. For example, with LoRA:

        ModelConfig(path="Qwen/Qwen3-0.6B", lora_rank=16, lora_alpha=32)
    """

    SECTION = "actor_rollout_ref.model"  # not annotated, so it is no key
    """The section that sets these keys, for messages."""

    path: str = config_field(
        "",
        allows="a folder or a name",
        required="set a folder with a model and its tokenizer, or a name on the Hugging Face hub",
    )
    """Model folder with a tokenizer, or a name on the Hugging Face hub."""
    random_init_seed: int | None = config_field(None, allows="a number", read_when=HAS_NO_WEIGHTS)
    """Seed of random weights, if the folder has no weights; null rejects such a folder."""
    enable_gradient_checkpointing: bool | int | None = config_field(
        None, at_least=0, may_change_on_resume=True
    )
    """Recompute activations in the backward pass, to save memory: of all layers, or of the first
    N. null: on CUDA, of as few as the plan's estimate of memory allows.
    """
    attn_implementation: str = config_field(
        "auto",
        choices=ATTENTIONS,
        may_change_on_resume=True,
        verl="actor_rollout_ref.model.override_config.attn_implementation",
    )
    """Attention kernel. `auto`: for 16-bit passes on GPUs, the newest FlashAttention that is
    installed, or torch's; otherwise sdpa, or eager if the model needs it.
    """
    use_remove_padding: bool = config_field(True, may_change_on_resume=True)
    """Pack rows without padding if the model supports it."""
    share_prefixes: bool = config_field(
        True, may_change_on_resume=True, verl="actor_rollout_ref.actor.use_prefix_grouper"
    )
    """Compute a prefix, such as a prompt, once for all rows of a pass that share it."""
    use_fused_kernels: bool = config_field(True, may_change_on_resume=True)
    """Compute large logits in chunks, to save memory."""
    dtype: str = config_field(
        "float32", choices=DTYPES, verl="actor_rollout_ref.actor.fsdp_config.model_dtype"
    )
    """Dtype of weights and optimizer state. bfloat16 rounds small updates away."""
    compute_dtype: str | None = config_field(None, choices=DTYPES)
    """Dtype of the forward and backward passes; null: bfloat16 on GPUs, otherwise `dtype`."""
    compile: str = config_field("auto", choices=COMPILES, may_change_on_resume=True)
    """Compile layers with torch.compile; `auto`: only on GPUs."""
    freeze_vision_tower: bool = config_field(
        True, read_when=TOWER_MAY_LEARN, verl="actor_rollout_ref.actor.freeze_vision_tower"
    )
    """Train only the language half of a vision-language model."""
    lora_rank: int = config_field(0, at_least=0)
    """LoRA rank; 0 trains all weights."""
    lora_alpha: int = config_field(16, above=0, read_when=HAS_LORA)
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: Any = config_field(
        "all-linear", allows="all-linear, or a list of names", read_when=HAS_LORA
    )
    """Layers with adapters: `all-linear` (without head and routed experts), or names ([q_proj])."""
    quantization: str | None = config_field(
        None,
        choices=BASE_QUANTIZATIONS,
        hint="int8 is only for roles that are not trained",
        read_when=HAS_FROZEN_BASE,
    )
    """`nf4`: store the base's linear weights in 4 bits, unsharded on each rank (QLoRA); needs
    `lora_rank`. null disables quantization.
    """


@dataclass(kw_only=True)
class CheckpointConfig(Section):
    """What a role saves in a checkpoint."""

    save_contents: list[str] = config_field(
        factory=lambda: ["model", "optimizer", "extra"],
        choices=SAVE_CONTENTS,
        read_when=SAVES,
        may_change_on_resume=True,
    )
    """Contents of a checkpoint. A resume needs `model`, and to continue with the same numbers also
    `optimizer` and `extra` (the random state). `hf_model` is a Hugging Face folder.
    """
