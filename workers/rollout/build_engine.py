"""Build this rank's rollout engine from the configuration.

native, hf    one engine per rank; native without quantization decodes with the actor's module if
              this process has all of its weights, in the dtype `rollout.dtype`
vllm          one engine per `tensor_model_parallel_size` ranks, over which the model is sharded
your class    one engine per rank, built by `YourEngine(module, limits, decode=...)`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from verl_like.errors import ConfigError, RolloutError
from verl_like.registry import CallSignature, check_call, check_methods
from workers.config import has_environment
from workers.config.policy import ROUTING_KEY, replays_routing
from workers.config.rollout import AUTO, FP8, ROLLOUT_ENGINES
from workers.models.folder import model_folder
from workers.models.precision import name_of, precision_of, rollout_dtype
from workers.models.state import set_buffer_dtype
from workers.rollout.base import EngineLimits, RolloutEngine

if TYPE_CHECKING:
    from verl_like.process.worker import Worker
    from workers.config import ActorRolloutRefConfig, RolloutConfig, WorkersConfig

SECTION = "actor_rollout_ref.rollout"


def resolve_engine(name: str, device_type: str) -> str:
    """Return the configured engine.

    "auto" is vllm on GPUs if a supported version is installed, otherwise native.
    """
    if name != AUTO:
        return name
    if device_type != "cuda":
        return "native"
    from workers.rollout.vllm.setup import check_version

    try:
        check_version("cuda")
    except ConfigError:
        return "native"
    return "vllm"


def takes_adapter(policy: ActorRolloutRefConfig) -> bool:
    """True if the engine loads the base model itself, so that syncs send only the LoRA adapter."""
    rollout = policy.rollout
    is_vllm = rollout.name == "vllm" and not rollout.server_urls
    if policy.model.quantization:
        return False  # the engine's own base is not rounded as the trainer's
    return is_vllm and policy.model.lora_rank > 0 and not rollout.merge_lora


def notices_of_engine(name: str, device_type: str, is_assumed: bool = False) -> list[str]:
    """Return a notice if this engine is slow on this device, or only assumed for simulated GPUs."""
    if (name, device_type) != ("native", "cuda"):
        return []
    if is_assumed:
        return [
            "note: no supported vLLM is installed here, so the slow native engine is assumed; add "
            f"{SECTION}.name=vllm for GPUs with vLLM"
        ]
    return [
        "note: this run generates with the native engine, which is slow on GPUs: it has no CUDA "
        f"graphs and no paged KV cache. {SECTION}.name=auto chooses vLLM if a supported version is "
        'installed (pip install -e ".[vllm]")'
    ]


def check_engine(config: WorkersConfig, world_size: int) -> None:
    """Reject an unknown engine, and settings that do not fit it or the number of processes."""
    rollout = config.actor_rollout_ref.rollout
    assert rollout.name != AUTO, "`settle` has chosen the engine"
    user_engine(rollout.name)
    if rollout.engine_kwargs:
        from workers.rollout.vllm.setup import check_options

        check_options(rollout.engine_kwargs)
    urls = rollout.server_urls
    if urls and (len(urls) != world_size or len(set(urls)) != world_size):
        raise ConfigError(
            f"{SECTION}.server_urls has {len(urls)} entries, {len(set(urls))} of them different, "
            f"but needs one separate server for each of the rollout's {world_size} process(es)."
        )
    ranks = ranks_per_engine(config)
    if world_size % ranks:
        valid = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(
            f"{SECTION}.tensor_model_parallel_size={ranks} does not divide the rollout's "
            f"{world_size} processes; valid: {valid}."
        )


def check_quantization(rollout: RolloutConfig, device_type: str) -> None:
    """Reject a quantization that this engine does not support on this device."""
    quantization, passed_on = rollout.quantization, rollout.engine_kwargs.get("quantization")
    pair = f"{SECTION}.quantization={quantization} with {SECTION}.name={rollout.name}"
    if quantization is None:
        return
    if passed_on:
        raise ConfigError(
            f"{pair} and {SECTION}.engine_kwargs.quantization={passed_on}: vLLM accepts only one. "
            "Leave out one of them."
        )
    if (quantization == FP8) != (rollout.name == "vllm"):
        raise ConfigError(
            f"{pair}: vllm supports fp8, native and hf support int8 on CPUs. Change one, or leave "
            "out quantization."
        )
    if quantization != FP8:
        from workers.models.quantize import check_device

        check_device(device_type)
        return
    default_dtype = "bfloat16" if device_type == "cuda" else "float32"
    if (rollout.dtype or default_dtype) != "bfloat16":
        raise ConfigError(
            f"{pair}: vLLM's fp8 layers compute in bfloat16, but {SECTION}.dtype={rollout.dtype} "
            f"on {device_type} is not bfloat16. Set {SECTION}.dtype=bfloat16."
        )


def user_engine(name: str) -> type[RolloutEngine] | None:
    """Return your class if `name` is its path or its registered name; None for built-in engines."""
    engine = ROLLOUT_ENGINES.look_up(name)
    if engine == name:
        return None
    if not (isinstance(engine, type) and issubclass(engine, RolloutEngine)):
        raise ConfigError(
            f"{SECTION}.name={name} is not a rollout engine. Make it a subclass of "
            "verl_like.extend.RolloutEngine."
        )
    subject = f"{SECTION}.name={name}"
    check_methods(engine, RolloutEngine, subject)
    check_call(engine, subject, CallSignature("module", "limits", by_name=["decode"]))
    return engine


def check_notes_routing(rollout: RolloutConfig) -> None:
    """Reject an engine that does not record which experts its model chooses."""
    custom = user_engine(rollout.name)
    if rollout.server_urls or (custom and custom.no_choices is RolloutEngine.no_choices):
        engine = "a vLLM server" if rollout.server_urls else rollout.name
        raise ConfigError(
            f"{ROUTING_KEY} with {SECTION}.name={rollout.name}: {engine} does not record which "
            f"experts its routers choose. Set {SECTION}.name=native, or leave out {ROUTING_KEY}."
        )


def ranks_per_engine(config: WorkersConfig) -> int:
    """Return the number of consecutive ranks that share an engine."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1


def build_engine(
    config: WorkersConfig, worker: Worker, reads_images: bool = False
) -> RolloutEngine:
    """Return the engine of this rank, stale until the first sync."""
    policy = config.actor_rollout_ref
    rollout = policy.rollout
    limits = EngineLimits(
        prompt_width=config.data.max_prompt_length,
        response_width=config.data.max_response_length,
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_gib=rollout.kv_cache_gib,
        keep_kv_cache=rollout.keep_kv_cache,
    )
    decode = None
    if rollout.sampling_kwargs.get("stop_strings") or has_environment(config):
        tokenizer = tokenizer_of(policy.model.path)
        decode = partial(tokenizer.decode, skip_special_tokens=False)

    if rollout.name == "vllm":
        torch.cuda.empty_cache()  # vLLM allocates outside torch's cache
        return _vllm_engine(config, worker, limits, decode, reads_images)

    dtype = rollout_dtype(policy, worker.device.type)
    may_share = rollout.name == "native" and not rollout.quantization
    shared = shared_module(worker, dtype) if may_share else None
    module = shared
    if shared is None:
        module = load_module(policy, worker.device.type, worker.device, rollout.quantization)
    if rollout.name == "hf":
        from workers.rollout.hf import HFRolloutEngine

        return HFRolloutEngine(module, limits, decode=decode)
    custom = user_engine(rollout.name)
    if custom:
        make: Any = custom  # its signature is unknown to mypy
        engine: RolloutEngine = make(module, limits, decode=decode)
        return engine
    from workers.rollout.native.engine import NativeRolloutEngine

    return NativeRolloutEngine(module, limits, owns_weights=shared is None, decode=decode)


def load_module(
    policy: ActorRolloutRefConfig,
    device_type: str,
    device: torch.device,
    quantization: str | None = None,
) -> Any:
    """Load the folder's model to `device`, in the dtype of a rollout on `device_type`."""
    from workers.models.load import load_model

    dtype = name_of(rollout_dtype(policy, device_type))
    model = replace(policy.model, dtype=dtype, compute_dtype=dtype)
    module = load_model(model, "token", device, quantization)
    set_buffer_dtype(module, precision_of(policy.model, device_type).weights)
    return module


def shared_module(worker: Worker, dtype: torch.dtype) -> Any:
    """Return the actor's module if this process has all of its weights in this dtype, or None."""
    actor: Any = worker.sibling("actor")
    if actor is None or not getattr(actor, "lends_module", True):
        return None
    if getattr(actor.engine, "module", None) is None:
        raise RolloutError(
            "rollout.init_model shares the actor's module. Call the actor's init_model first."
        )
    is_other = not actor.engine.is_whole or actor.engine.module.dtype != dtype
    return None if is_other else actor.engine.module


def tokenizer_of(path: str) -> Any:
    """Return the tokenizer of a model's folder, or of a model on the Hugging Face hub."""
    from transformers import AutoTokenizer

    folder = model_folder(path, weights=False)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _fp8_scheme(device: torch.device) -> str:
    """Return vLLM's fp8 with a scale per output and per token, which CPUs have, too.

    GPUs without float8 products have only weights in fp8, with one scale.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "fp8"
    return "fp8_per_channel"


def _vllm_engine(
    config: WorkersConfig,
    worker: Worker,
    limits: EngineLimits,
    decode: Callable[[list[int]], str] | None,
    reads_images: bool = False,
) -> RolloutEngine:
    """Return an engine on vLLM: in this process, over several ranks, or on a server."""
    from workers.rollout.vllm.engine import VllmRolloutEngine
    from workers.rollout.vllm.in_process import Lockstep
    from workers.rollout.vllm.setup import VllmSettings

    policy = config.actor_rollout_ref
    options = dict(policy.rollout.engine_kwargs)
    if policy.rollout.quantization:
        options["quantization"] = _fp8_scheme(worker.device)
    loads_base = takes_adapter(policy)
    settings = VllmSettings(
        model_path=str(model_folder(policy.model.path, weights=loads_base)),
        dtype=name_of(rollout_dtype(policy, worker.device.type)),
        gpu_memory_utilization=policy.rollout.gpu_memory_utilization,
        device_type=worker.device.type,
        notes_routing=replays_routing(policy),
        adapter=policy.model if loads_base else None,
        options=options,
        reads_images=reads_images and not policy.rollout.server_urls,
    )
    urls = policy.rollout.server_urls
    if urls:
        return VllmRolloutEngine(settings, limits, decode=decode, server_url=urls[worker.rank])
    ranks = ranks_per_engine(config)
    lockstep = Lockstep(worker, ranks) if ranks > 1 else None
    return VllmRolloutEngine(settings, limits, decode=decode, lockstep=lockstep)
