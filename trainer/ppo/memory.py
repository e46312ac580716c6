"""Memory of PPO's roles on a device: shown in the plan, held against the device's, and the passes
that fit into it.

`trainer.memory` counts one role; which roles there are, and what their passes hold, is said here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trainer.config.offload import device_type_of
from trainer.groups.nodes import joined_cluster
from trainer.memory import (
    GIB,
    LargestPass,
    RoleMemory,
    check_fit,
    copied_contents,
    engine_memory,
    hf_config_of,
    memory_of_this_gpu,
    memory_table,
    pool_bytes,
)
from trainer.ppo.config import PPOConfig
from trainer.ppo.quantization import quantization_of
from trainer.ppo.sizes import CRITIC_COPY, rows_of
from trainer.ppo.update_samples import longest_row
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from verl_like.process.machine import memory_gb
from workers.config import FSDPConfig, ModelConfig, critic_model, model_rewards, teacher_model
from workers.config.passes import fewest_tokens_per_pass, tokens_per_pass
from workers.models.attention import resolve_attention, why_no_flash, why_no_kernel
from workers.models.causal_lm import Head
from workers.models.memory_shapes import ModelShapes, model_shapes
from workers.models.precision import name_of, precision_of, rollout_dtype
from workers.parallel.sharding import Sharding, settle


def role_memories(
    config: PPOConfig, device_type: str, device_bytes: int | None = None
) -> list[RoleMemory]:
    """Of every role with a model."""
    policy = config.actor_rollout_ref
    frozen_sharding = settle("fsdp", FSDPConfig())
    judges = model_rewards(config)

    found = []
    for role in expand_roles(config.role_mapping):
        kind = config.kind_of(role)
        if kind == "rollout":
            found.append(_rollout(config.of_role(role), role, device_type, device_bytes))
        elif kind == "actor":
            sharding = settle(policy.actor.strategy, policy.actor.fsdp_config)
            found.append(_engine(config, role, policy.model, "token", sharding, device_type))
        elif kind in ("critic", CRITIC_COPY):
            sharding = settle(config.critic.strategy, config.critic.model.fsdp_config)
            model = critic_model(config)
            found.append(_engine(config, role, model, "scalar", sharding, device_type))
        elif kind == "ref" and not policy.model.lora_rank:
            sharding = settle(policy.actor.strategy, policy.ref.fsdp_config)
            found.append(_engine(config, role, policy.model, "token", sharding, device_type))
        elif kind == "teacher":
            sharding = settle(policy.actor.strategy, config.distillation.teacher_model.fsdp_config)
            model = teacher_model(config)
            found.append(_engine(config, role, model, "token", sharding, device_type))
        elif kind in judges:
            model = replace(policy.model, path=judges[kind].path, lora_rank=0)
            found.append(_engine(config, role, model, "score", frozen_sharding, device_type))
    return found


def attention_of(config: PPOConfig, device_type: str) -> str:
    """What the policy's passes attend by on such a device, with what is installed here.

    A kernel is tried out on the device itself when the run begins.
    """
    from transformers import AutoModelForCausalLM

    model = config.actor_rollout_ref.model
    hf_config = hf_config_of(model)
    cls = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    compute = precision_of(model, device_type).compute
    device = torch.device(device_type)
    chosen = resolve_attention(model.attn_implementation, device, compute, cls, hf_config)
    if model.attn_implementation in ("sdpa", "eager") or why_no_kernel(device, compute):
        return chosen
    kernel = "torch.nn.attention.varlen" if why_no_flash(device, compute) else "flash-attn"
    return f"packed rows by FlashAttention ({kernel}), padded rows by {chosen}"


def _engine(
    config: PPOConfig,
    role: str,
    model: ModelConfig,
    head: Head,
    sharding: Sharding,
    device_type: str,
) -> RoleMemory:
    """A role with a training engine."""
    compute = precision_of(model, device_type).compute
    pool = expand_roles(config.role_mapping)[role]
    return engine_memory(
        role,
        pool,
        sum(config.resource_pool_spec[pool]),
        model,
        head,
        sharding,
        device_type,
        LargestPass(*tokens_at_once(config, role)),
        trains=role in ("actor", "critic"),
        quantization=quantization_of(config, role),
        averages=_averages(config, role, model_shapes(model, head, compute), compute),
        copied=copied_contents(config.trainer, _saved(config, role)),
    )


def _saved(config: PPOConfig, role: str) -> Sequence[str]:
    """What a checkpoint has of the role's tensors."""
    policy = config.actor_rollout_ref
    if role == "ref":
        return ("model",) if policy.ref.update_every is not None else ()
    checkpoints = {"actor": policy.actor.checkpoint, "critic": config.critic.checkpoint}
    return checkpoints[role].save_contents if role in checkpoints else ()


def _averages(config: PPOConfig, role: str, shapes: ModelShapes, compute: torch.dtype) -> float:
    """Bytes of a moving average in float32 beside the weights."""
    policy = config.actor_rollout_ref
    if role == "actor" and policy.actor.ema_decay is not None:
        return shapes.num_trained * torch.float32.itemsize
    follows = policy.ref.update_every is not None and policy.ref.ema_decay > 0
    if role == "ref" and follows and compute != torch.float32:
        return shapes.num_weights * torch.float32.itemsize
    return 0


def tokens_at_once(config: PPOConfig, role: str) -> tuple[int, int]:
    """(tokens, response positions) of the role's largest pass, all of full length."""
    if (kind := config.kind_of(role)) in (judges := model_rewards(config)):
        return _judges_pass(config, role, judges[kind].micro_batch_size_per_gpu)
    width = config.data.max_prompt_length + config.data.max_response_length
    share = config.data.max_response_length / width
    most = 0
    for row in rows_of(config):
        if row.role == role:
            at_once = row.micro_samples * width if row.micro_samples else row.micro_tokens
            most = max(most, min(at_once, _on_a_rank(config, role, row.prompts) * width))
    reads = round(most * share)
    if role == "actor" and config.ptx.train_files:
        actor = config.actor_rollout_ref.actor
        of_ptx = actor.ppo_micro_batch_size_per_gpu * longest_row(config)
        if actor.use_dynamic_bsz:
            of_ptx = tokens_per_pass(config)
        return max(most, of_ptx), max(reads, of_ptx)  # every token of a text is in the loss
    return most, reads


def _judges_pass(config: PPOConfig, role: str, num_rows: int | None) -> tuple[int, int]:
    """(tokens, rows) of a reward model's pass: of these rows or, at None, cut as the actor's."""
    width = config.data.max_prompt_length + config.data.max_response_length
    actor = config.actor_rollout_ref.actor
    rows = num_rows or actor.ppo_micro_batch_size_per_gpu
    if num_rows is None and actor.use_dynamic_bsz:
        rows = tokens_per_pass(config) // width
    rows = min(rows, _on_a_rank(config, role, config.prompts_per_call(role)))
    return rows * width, rows


def _on_a_rank(config: PPOConfig, role: str, num_prompts: int) -> int:
    """Samples of so many prompts that one rank of the role has at most."""
    ranks = sum(config.resource_pool_spec[expand_roles(config.role_mapping)[role]])
    return -(-num_prompts * config.actor_rollout_ref.rollout.n // ranks)


def _rollout(
    config: PPOConfig, role: str, device_type: str, device_bytes: int | None
) -> RoleMemory:
    """The engine's own weights, if it has any, and its cache; vLLM takes a share of a GPU whole."""
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    kept = precision_of(policy.model, device_type).weights
    dtype = rollout_dtype(policy, device_type)
    pools = expand_roles(config.role_mapping)
    shapes = model_shapes(replace(policy.model, lora_rank=0), "token", dtype)
    weights: float = shapes.held(dtype, rollout.quantization)
    width = config.data.max_prompt_length + config.data.max_response_length
    per_sample = shapes.key_value_numbers * dtype.itemsize * width
    cache: float = min(rollout.kv_cache_gb * GIB, rollout.max_num_seqs * per_sample)

    if rollout.name == "vllm":
        weights /= rollout.tensor_model_parallel_size
        if device_type == "cuda" and device_bytes is not None:
            cache = max(0, rollout.gpu_memory_utilization * device_bytes - weights)
    ranks = sum(config.resource_pool_spec[pools[role]])
    is_whole = ranks == 1 or policy.actor.strategy == "ddp"
    beside_actor = pools["actor"] == pools[role]
    may_share = rollout.name == "native" and not rollout.quantization
    if may_share and beside_actor and is_whole and dtype == kept:
        weights = 0  # the actor's own module
    types = " / ".join(filter(None, [rollout.quantization, name_of(dtype)]))
    return RoleMemory(role, pools[role], types, weights=weights, kv_cache=cache)


def check_memory(config: PPOConfig, device_type: str, device_bytes: int | None) -> None:
    """Refuse a run whose roles do not fit on their devices."""
    if device_bytes is not None:
        check_fit(role_memories(config, device_type, device_bytes), device_bytes, WAYS_OUT)


WAYS_OUT = (
    "Take smaller passes (ppo_micro_batch_size_per_gpu, or ppo_max_token_len_per_gpu), "
    "model.enable_gradient_checkpointing=true, fsdp_config.param_offload and optimizer_offload, a "
    "lower rollout.gpu_memory_utilization or kv_cache_gb, or more devices."
)


def plan_text(
    config: PPOConfig,
    max_columns: int | None = None,
    device_type: str | None = None,
    device_bytes: int | None = None,
) -> str:
    """The table for the plan, or why there is none; of this machine's devices if none are told."""
    if device_type is None:
        device_type = device_type_of(config.trainer)
        device_bytes = memory_of_this_gpu(device_type)
    try:
        roles = role_memories(config, device_type, device_bytes)
        table = memory_table(roles, device_type, device_bytes, max_columns)
        return f"{table}\nattention: {attention_of(config, device_type)}"
    except (ConfigError, OSError, ValueError) as error:
        return f"Memory: not known: {error}"


SHARE_OF_A_MACHINE = 0.5
"""Of a machine's memory, what the processes of a run on CPUs may plan with together."""


def fit_passes(config: PPOConfig, device_type: str, device_bytes: int | None) -> None:
    """Write a smaller `ppo_max_token_len_per_gpu` where the default would not fit on a device.

    Half as many tokens at a time, down to the longest row. What the user has set stays, and so does
    the default where the memory of the devices is not known.
    """
    actor = config.actor_rollout_ref.actor
    if not actor.use_dynamic_bsz or actor.ppo_max_token_len_per_gpu is not None:
        return
    if device_type == "cpu":
        device_bytes = _share_of_this_machine(config)
    pools = set(expand_roles(config.role_mapping).values())
    if device_bytes is None or not pools <= config.resource_pool_spec.keys():
        return  # of a pool that is not there the plan will say more

    fewest, default = fewest_tokens_per_pass(config), tokens_per_pass(config)
    tokens = default
    while tokens > fewest and not _fits(config, tokens, device_type, device_bytes):
        tokens = max(fewest, tokens // 2)
    if tokens < default:
        actor.ppo_max_token_len_per_gpu = tokens


def _fits(config: PPOConfig, tokens: int, device_type: str, device_bytes: int) -> bool:
    """Whether every pool has room for passes of so many tokens; also where nobody can count."""
    actor = config.actor_rollout_ref.actor
    actor.ppo_max_token_len_per_gpu = tokens
    try:
        needed = pool_bytes(role_memories(config, device_type, device_bytes))
    except (ConfigError, OSError, ValueError):
        return True
    finally:
        actor.ppo_max_token_len_per_gpu = None
    return max(needed.values()) <= device_bytes


def _share_of_this_machine(config: PPOConfig) -> int | None:
    """Bytes that each of the run's processes may plan with on a machine without GPUs.

    None on a cluster, of whose machines the driver's says nothing.
    """
    total = memory_gb("MemTotal:")
    if total is None or (joined_cluster(config) and config.trainer.backend == "ray"):
        return None
    processes = sum(map(sum, config.resource_pool_spec.values()))
    return int(SHARE_OF_A_MACHINE * total * GIB / max(processes, 1))
