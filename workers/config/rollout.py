"""Generation: the engine, how it samples in training and in validation, its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import When, key, unless, when
from verl_like.placement.roles import expand_roles
from verl_like.registry import Registry
from workers.config.conditions import CUT_BY_SAMPLES, VALIDATES
from workers.config.model import DTYPES, QUANTIZATIONS

ENGINES: Registry[Any] = Registry("rollout engine")
"""What `rollout.name` may be: the built-in ones, and a class by its dotted path."""
for _built_in in ("native", "hf", "vllm"):
    ENGINES.register(_built_in)(_built_in)  # `workers.rollout.build` has their classes
SYNCS = ("full", "changed")
"""What a weight sync sends."""


def _is_apart(_: Any, run: Any) -> bool:
    pools = expand_roles(run.role_mapping)
    return "actor" in pools and pools["actor"] != pools["rollout"]


ROLLOUT_IS_APART = When(
    "actor and rollout are on two pools",
    _is_apart,
    "actor and rollout share their processes: weights do not travel in pieces",
)
GENERATES_BESIDE = When(
    "samples are made beside the training",
    lambda _, run: getattr(run, "generates_beside_training", False),
    "samples are made before they are trained on, and not beside the training",
)
TAKES_WEIGHTS_AT_ONCE = When(
    "new weights may arrive in the middle of a generation",
    lambda _, run: getattr(run, "takes_weights_at_once", False),
    "weights arrive between two generations",
)
ENGINE_IS_VLLM = when("name", "vllm")
VLLM_IS_OURS = When(
    "`name` is vllm, in process",
    lambda section, _: section.name == "vllm" and not section.server_urls,
    "{section}name is not vllm, or vLLM is a server, whose own command decides that",
)
CACHE_IS_OURS = When(
    "`name` is not hf, nor vLLM a server",
    lambda section, _: section.name != "hf" and not section.server_urls,
    "{section}name is hf, or vLLM is a server, whose own command decides that",
)
ENGINE_IS_NOT_HF = unless("name", "hf")
ENGINE_IS_NOT_VLLM = unless(
    "name", "vllm", "rollout.name=vllm quantises by rollout.engine_kwargs.quantization"
)


@dataclass(kw_only=True)
class ValidationSamplingConfig:
    """How validation samples; greedy by default, and never as training does."""

    n: int = key(1, above=0)
    """Samples per prompt."""
    do_sample: bool = key(False)
    """False decodes greedily."""
    temperature: float = key(1.0, allows="a number", read_when=when("do_sample"))
    """Divides the logits."""
    top_k: int = key(-1, above=0, or_exactly=-1, hint="or -1 for all", read_when=when("do_sample"))
    """Sample among the k likeliest tokens; -1 takes all."""
    top_p: float = key(1.0, above=0, at_most=1, read_when=when("do_sample"))
    """Sample among the likeliest tokens of this total probability; 1 takes all."""


@dataclass(kw_only=True)
class RolloutConfig:
    """How samples are generated: engine, sampling, memory and weight sync."""

    name: str = key("native", registry="rollout engine")
    """Engine."""
    dtype: str | None = key(None, choices=DTYPES)
    """Type of the engine's weights, cast at each sync; null is what the trainer computes in."""
    quantization: str | None = key(None, choices=QUANTIZATIONS, read_when=ENGINE_IS_NOT_VLLM)
    """int8: linear weights are quantised at each sync; null keeps them as they come."""
    n: int = key(1, above=0)
    """Samples per prompt."""
    temperature: float = key(1.0, above=0)
    """Divides the logits, here and in every log-prob pass."""
    top_k: int = key(-1, above=0, or_exactly=-1, hint="or -1 for all", read_when=when("do_sample"))
    """Sample among the k likeliest tokens; -1 takes all."""
    top_p: float = key(1.0, above=0, at_most=1, read_when=when("do_sample"))
    """Sample among the likeliest tokens of this total probability; 1 takes all."""
    do_sample: bool = key(True)
    """False decodes greedily."""
    max_num_seqs: int = key(256, above=0, read_when=ENGINE_IS_NOT_HF, may_change_on_resume=True)
    """Samples decoded together on one rank."""
    kv_cache_gb: float = key(4.0, above=0, read_when=CACHE_IS_OURS, may_change_on_resume=True)
    """Most memory of keys and values on one rank, in GiB; native and vllm on CPUs."""
    keep_kv: bool = key(False, read_when=TAKES_WEIGHTS_AT_ONCE)
    """Keep the KV cache of what is in flight when new weights arrive; false computes it again."""
    max_new_tokens_per_call: int | None = key(
        None, above=0, hint="or null for whole responses", read_when=GENERATES_BESIDE
    )
    """Tokens of a response that one call draws; what is unfinished then goes on in a later one."""
    sampling_kwargs: dict[str, Any] = key(
        factory=dict,
        allows="min_p, min_tokens, stop_strings, stop_token_ids, logit_bias, truncated_log_probs",
    )
    """Further sampling settings; validation reads the stops alone."""
    update_weights_bucket_megabytes: float = key(
        16.0, above=0, read_when=ROLLOUT_IS_APART, may_change_on_resume=True
    )
    """Weights travel to the rollout in pieces of about this size."""
    sync: str = key("full", choices=SYNCS, read_when=ROLLOUT_IS_APART, may_change_on_resume=True)
    """What travels to the rollout: all weights, or those that have changed, LoRA as its factors."""
    read_back_every: int = key(10, above=0, may_change_on_resume=True)
    """On GPUs: read the engine's weights back at one of so many weight syncs; on CPUs at each."""
    server_urls: list[str] = key(
        factory=list,
        allows="http://HOST:PORT, one for each rank of the rollout",
        read_when=ENGINE_IS_VLLM,
        may_change_on_resume=True,
    )
    """vllm: servers that are running already; empty starts engines in the rollout's processes."""
    engine_kwargs: dict[str, Any] = key(
        factory=dict, allows="what vLLM's LLM takes", read_when=VLLM_IS_OURS
    )
    """vllm: further arguments of its LLM class, such as quantization."""
    tensor_model_parallel_size: int = key(
        1, above=0, read_when=VLLM_IS_OURS, may_change_on_resume=True
    )
    """vllm: ranks that share one engine; divides the rollout's pool."""
    gpu_memory_utilization: float = key(
        0.5, above=0, at_most=1, read_when=VLLM_IS_OURS, may_change_on_resume=True
    )
    """vllm: share of a device's memory that the engine takes."""
    log_prob_micro_batch_size_per_gpu: int = key(
        8, above=0, read_when=CUT_BY_SAMPLES, may_change_on_resume=True
    )
    """Samples per forward pass of the old log-probs on one rank."""
    val_kwargs: ValidationSamplingConfig = key(
        factory=ValidationSamplingConfig, read_when=VALIDATES, may_change_on_resume=True
    )
    """Sampling in validation."""
