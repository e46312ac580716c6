"""Generation: the engine, its sampling in training and validation, its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import ReadWhen, Section, config_field, unless, when
from verl_like.placement.pools import expand_roles
from verl_like.registry import Registry
from workers.config.conditions import SPLIT_BY_SAMPLES, VALIDATES
from workers.config.model import DTYPES, QUANTIZATIONS

ROLLOUT_ENGINES: Registry[Any] = Registry("rollout engine", entry="subclass of RolloutEngine")
"""Names for `rollout.name`: the built-in engines, and yours.

    sorted(ROLLOUT_ENGINES)         # auto, hf, native, vllm

A path needs no name, and workers in other processes import it: `rollout.name=my_module.MyEngine`.
"""
AUTO = "auto"
for _built_in in (AUTO, "native", "hf", "vllm"):
    ROLLOUT_ENGINES.register(_built_in)(
        _built_in
    )  # `workers.rollout.build_engine` has their classes
FP8 = "fp8"
WEIGHT_SYNCS = ("full", "changed")
"""Contents of a weight sync."""


def _is_apart(_: Any, run: Any) -> bool:
    pools = expand_roles(run.role_mapping)
    return "actor" in pools and pools["actor"] != pools["rollout"]


ROLLOUT_IS_APART = ReadWhen(
    "actor and rollout are on two pools",
    _is_apart,
    "actor and rollout share their processes, so weights are not sent",
)
GENERATES_BESIDE = ReadWhen(
    "generation runs during training",
    lambda _, run: getattr(run, "generates_while_training", False),
    "generation does not run during training",
)
TAKES_WEIGHTS_AT_ONCE = ReadWhen(
    "new weights may arrive in the middle of a generation",
    lambda _, run: getattr(run, "takes_weights_at_once", False),
    "weights are updated only between generations",
)
ENGINE_IS_VLLM = when("name", "vllm")
VLLM_IS_OURS = ReadWhen(
    "`name` is vllm and `server_urls` is empty",
    lambda section, _: section.name == "vllm" and not section.server_urls,
    "{section}name is not vllm, or vLLM runs as a server and decides it",
)
VLLM_TAKES_ADAPTERS = ReadWhen(
    "`name` is vllm, in process, and the policy has LoRA adapters",
    lambda section, run: (
        VLLM_IS_OURS.condition(section, run) and run.actor_rollout_ref.model.lora_rank > 0
    ),
    "the policy has no LoRA adapters, or {section}name is not vllm in process",
)
CACHE_IS_OURS = ReadWhen(
    "`name` is neither hf nor vllm with `server_urls`",
    lambda section, _: section.name != "hf" and not section.server_urls,
    "{section}name is hf, or vLLM runs as a server and decides it",
)
ENGINE_IS_NOT_HF = unless("name", "hf")
WEIGHTS_ARE_OURS = ReadWhen(
    "vLLM does not run as a server",
    lambda section, _: not section.server_urls,
    "vLLM runs as a server and decides it",
)


@dataclass(kw_only=True)
class ValidationSamplingConfig(Section):
    """Sampling in validation: greedy by default, independent of training."""

    n: int = config_field(1, above=0)
    """Samples per prompt."""
    do_sample: bool = config_field(False)
    """Sample; false: decode greedily."""
    temperature: float = config_field(1.0, allows="a number", read_when=when("do_sample"))
    """Sampling temperature."""
    top_k: int = config_field(
        -1, above=0, or_exactly=-1, hint="or -1 for all", read_when=when("do_sample")
    )
    """Sample from the k most likely tokens; -1: from all."""
    top_p: float = config_field(1.0, above=0, at_most=1, read_when=when("do_sample"))
    """Sample from the most likely tokens with this total probability (nucleus sampling)."""


@dataclass(kw_only=True)
class RolloutConfig(Section):
    """Generation of samples: engine, sampling, memory and weight sync."""

    name: str = config_field(AUTO, registry="rollout engine")
    """Engine. `auto`: vllm on GPUs if a supported version is installed, otherwise native."""
    dtype: str | None = config_field(None, choices=DTYPES)
    """Dtype of the engine's weights; null: the dtype of the actor's passes
    (`model.compute_dtype`).
    """
    quantization: str | None = config_field(
        None, choices=(*QUANTIZATIONS, FP8), read_when=WEIGHTS_ARE_OURS
    )
    """Round linear weights at each sync. `int8`: native and hf on CPUs; `fp8`: vllm; null disables
    rounding.
    """
    n: int = config_field(1, above=0)
    """Samples per prompt."""
    temperature: float = config_field(1.0, above=0)
    """Sampling temperature. Log-probs are computed at the same temperature."""
    top_k: int = config_field(
        -1, above=0, or_exactly=-1, hint="or -1 for all", read_when=when("do_sample")
    )
    """Sample from the k most likely tokens; -1: from all."""
    top_p: float = config_field(1.0, above=0, at_most=1, read_when=when("do_sample"))
    """Sample from the most likely tokens with this total probability (nucleus sampling)."""
    do_sample: bool = config_field(True)
    """Sample; false: decode greedily."""
    max_num_seqs: int = config_field(
        256, above=0, read_when=ENGINE_IS_NOT_HF, may_change_on_resume=True
    )
    """Samples that a rank decodes together; with vLLM on GPUs, the default is 1024."""
    kv_cache_gib: float = config_field(
        4.0, above=0, read_when=CACHE_IS_OURS, may_change_on_resume=True
    )
    """GiB of KV cache per rank, for native and for vllm on CPUs. Native may store as much again
    between the turns of trajectories.
    """
    keep_kv_cache: bool = config_field(False, read_when=TAKES_WEIGHTS_AT_ONCE)
    """Keep the KV cache when weights arrive during generation; false recomputes it."""
    max_tokens_per_call: int | None = config_field(
        None, above=0, hint="or null for whole responses", read_when=GENERATES_BESIDE
    )
    """Maximum tokens that one call adds to a response; later calls continue it. null disables this
    limit.
    """
    sampling_kwargs: dict[str, Any] = config_field(
        factory=dict,
        allows="min_p, min_tokens, stop_strings, stop_token_ids, logit_bias, truncated_log_probs",
    )
    """Further sampling settings. Validation uses only the stop settings."""
    update_weights_bucket_megabytes: float = config_field(
        16.0, above=0, read_when=ROLLOUT_IS_APART, may_change_on_resume=True
    )
    """Size in MiB of the buckets in which weights are sent; on GPUs the default is 512."""
    weight_sync: str = config_field(
        "full", choices=WEIGHT_SYNCS, read_when=ROLLOUT_IS_APART, may_change_on_resume=True
    )
    """`full`: send all weights; `changed`: send only the numbers that changed (each side keeps a
    copy of the weights in host memory).
    """
    merge_lora: bool = config_field(False, read_when=VLLM_TAKES_ADAPTERS)
    """Send merged weights of a LoRA policy; false: vLLM loads the base model and gets adapters."""
    server_urls: list[str] = config_field(
        factory=list,
        allows="http://HOST:PORT, one for each rank of the rollout",
        read_when=ENGINE_IS_VLLM,
        may_change_on_resume=True,
    )
    """Running vLLM servers to use; empty: engines in the rollout's processes."""
    engine_kwargs: dict[str, Any] = config_field(
        factory=dict,
        allows="arguments of vLLM's LLM that no other key sets",
        read_when=VLLM_IS_OURS,
    )
    """Further arguments for vLLM's `LLM` class."""
    tensor_model_parallel_size: int = config_field(
        1, above=0, read_when=VLLM_IS_OURS, may_change_on_resume=True
    )
    """Ranks per vLLM engine; must divide the ranks of the rollout's pool."""
    gpu_memory_utilization: float = config_field(
        0.5, above=0, at_most=1, read_when=VLLM_IS_OURS, may_change_on_resume=True
    )
    """Fraction of a GPU's memory that vLLM uses; on CPUs, see `kv_cache_gib`."""
    log_prob_micro_batch_size_per_gpu: int = config_field(
        8, above=0, read_when=SPLIT_BY_SAMPLES, may_change_on_resume=True
    )
    """Samples per forward pass and rank when the old log-probs, or a teacher's, are computed."""
    val_kwargs: dict[str, Any] = config_field(
        factory=dict,
        options=ValidationSamplingConfig,
        read_when=VALIDATES,
        may_change_on_resume=True,
    )
    """Sampling in validation; by default greedy, one sample per prompt."""

    @property
    def validation(self) -> ValidationSamplingConfig:
        """Complete sampling settings of validation."""
        return ValidationSamplingConfig(**self.val_kwargs)
