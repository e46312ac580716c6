"""Memory of every role on a device, from shapes: shown in the plan, and held against the device's.

Roles of one pool share its devices. What they keep is added up; of what a call takes on top (whole
layers, activations, logits) the largest counts, since they take turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from trainer.config.offload import device_type_of
from trainer.ppo.config import PPOConfig
from trainer.ppo.ptx import longest_row
from trainer.ppo.quantization import quantization_of
from trainer.ppo.sizes import rows_of
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from verl_like.terminal import draw_table
from workers.config import FSDPConfig, ModelConfig, critic_model, model_rewards, teacher_model
from workers.models.attention import resolve_attention, why_no_flash, why_no_kernel
from workers.models.causal_lm import Head
from workers.models.folder import model_folder
from workers.models.memory_shapes import ModelShapes, model_shapes
from workers.models.precision import name_of, precision_of, rollout_dtype
from workers.parallel.fsdp import Sharding, settle
from workers.training.lm_head import positions_at_once

GIB = 2**30


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on one device; `host` are those that it keeps in the machine's memory."""

    role: str
    pool: str
    types: str
    weights: float = 0
    gradients: float = 0
    moments: float = 0
    whole: float = 0
    activations: float | None = 0
    kv_cache: float = 0
    host: float = 0

    @property
    def kept(self) -> float:
        """What stays on the device between calls."""
        return self.weights + self.moments + self.kv_cache - self.host

    @property
    def call(self) -> float:
        """What a call takes on top of it, offloaded parts included."""
        return self.gradients + self.whole + (self.activations or 0) + self.host


def role_memories(
    config: PPOConfig, device_type: str, device_bytes: int | None = None
) -> list[RoleMemory]:
    """Of every role with a model."""
    policy = config.actor_rollout_ref
    frozen_sharding = settle("fsdp", FSDPConfig())
    judges = model_rewards(config)
    found = []
    for role in expand_roles(config.role_mapping):
        if role == "rollout":
            found.append(_rollout(config, device_type, device_bytes))
        elif role == "actor":
            sharding = settle(policy.actor.strategy, policy.actor.fsdp_config)
            found.append(_engine(config, role, policy.model, "token", sharding, device_type))
        elif role == "critic":
            sharding = settle(config.critic.strategy, config.critic.model.fsdp_config)
            model = critic_model(config)
            found.append(_engine(config, role, model, "scalar", sharding, device_type))
        elif role == "ref" and not policy.model.lora_rank:
            sharding = settle(policy.actor.strategy, policy.ref.fsdp_config)
            found.append(_engine(config, role, policy.model, "token", sharding, device_type))
        elif role == "teacher":
            sharding = settle(policy.actor.strategy, config.distillation.teacher_model.fsdp_config)
            model = teacher_model(config)
            found.append(_engine(config, role, model, "token", sharding, device_type))
        elif role in judges:
            model = replace(policy.model, path=judges[role].path, lora_rank=0)
            found.append(_engine(config, role, model, "score", frozen_sharding, device_type))
    return found


def attention_of(config: PPOConfig, device_type: str) -> str:
    """What the policy's passes attend by on such a device, with what is installed here.

    A kernel is tried out on the device itself when the run begins.
    """
    from transformers import AutoModelForCausalLM

    model = config.actor_rollout_ref.model
    hf_config = _hf_config(model)
    cls = AutoModelForCausalLM._model_mapping.get(type(hf_config), None)
    compute = precision_of(model, device_type).compute
    device = torch.device(device_type)
    chosen = resolve_attention(model.attn_implementation, device, compute, cls, hf_config)
    if model.attn_implementation in ("sdpa", "eager") or why_no_kernel(device, compute):
        return chosen
    kernel = "torch.nn.attention.varlen" if why_no_flash(device, compute) else "flash-attn"
    return f"packed rows by FlashAttention ({kernel}), padded rows by {chosen}"


def _hf_config(model: ModelConfig) -> Any:
    from transformers import AutoConfig

    folder = model_folder(model.path, weights=False)
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _engine(
    config: PPOConfig,
    role: str,
    model: ModelConfig,
    head: Head,
    sharding: Sharding,
    device_type: str,
) -> RoleMemory:
    """A training engine; a frozen one keeps its weights in the type that it computes in.

    Or in int8, and then whole on every rank.
    """
    trains = role in ("actor", "critic")
    quantization = quantization_of(config, role)
    precision = precision_of(model, device_type)
    compute = precision.compute
    kept = precision.weights if trains else compute
    shapes = model_shapes(model, head, compute)
    pool = expand_roles(config.role_mapping)[role]
    ranks = sum(config.resource_pool_spec[pool])
    shards = 1
    if ranks > 1 and not quantization and sharding.strategy not in ("ddp", "single"):
        shards = ranks if sharding.fsdp_size == -1 else sharding.fsdp_size

    weights = shapes.held(kept, quantization) / shards
    trained = shapes.num_trained * kept.itemsize / shards if trains else 0
    moments = 2 * trained
    weights += _averages(config, role, shapes, compute) / shards
    offloads = device_type == "cuda"
    host = offloads * (sharding.param_offload * weights + sharding.optimizer_offload * moments)
    tokens, reads = tokens_at_once(config, role)
    at_once, chunked = reads, 0
    if head == "token":
        at_once = positions_at_once(_hf_config(model), reads, model.use_fused_kernels)
        chunked = shapes.beside_chunks(reads, trains) if at_once < reads else 0
    activations: float | None = shapes.logits(at_once)
    if trains:
        activations = shapes.saved(tokens, at_once, model.enable_gradient_checkpointing)
    if activations is not None:
        activations += chunked
    names = [quantization or name_of(kept), name_of(compute)]
    return RoleMemory(
        role=role,
        pool=pool,
        types=" / ".join(dict.fromkeys(names)),
        weights=weights,
        gradients=trained,
        moments=moments,
        whole=_whole(shapes, shards, kept != compute, trains, sharding.strategy),
        activations=activations,
        host=host,
    )


def _averages(config: PPOConfig, role: str, shapes: ModelShapes, compute: torch.dtype) -> float:
    """Bytes of a moving average in float32 beside the weights."""
    policy = config.actor_rollout_ref
    if role == "actor" and policy.actor.ema_decay is not None:
        return shapes.num_trained * torch.float32.itemsize
    follows = policy.ref.update_every is not None and policy.ref.ema_decay > 0
    if role == "ref" and follows and compute != torch.float32:
        return shapes.num_weights * torch.float32.itemsize
    return 0


def _whole(
    shapes: ModelShapes, shards: int, casts: bool, trains: bool, strategy: str = "fsdp"
) -> float:
    """Weights that a pass holds beside its shards: gathered ones, or a copy in the compute type.

    FSDP holds what is outside the layers, and two layers of which one is on its way (all of them
    under shard_grad_op); with a gradient of each in a backward pass, but for layers that wait.
    """
    if shards > 1:
        layer = (shapes.num_weights - shapes.num_outside_layers) / shapes.num_layers
        in_use = shapes.num_outside_layers + 2 * layer
        gathered = shapes.num_weights if strategy == "shard_grad_op" else in_use
        return (gathered + trains * in_use) * shapes.compute_bytes
    return shapes.num_weights * shapes.compute_bytes if casts else 0


def tokens_at_once(config: PPOConfig, role: str) -> tuple[int, int]:
    """(tokens, response positions) of the role's largest pass, all of full length."""
    if role in (judges := model_rewards(config)):
        rows = judges[role].micro_batch_size_per_gpu
        return rows * (config.data.max_prompt_length + config.data.max_response_length), rows
    width = config.data.max_prompt_length + config.data.max_response_length
    share = config.data.max_response_length / width
    most = 0
    for row in rows_of(config):
        if row.role == role:
            most = max(
                most, row.micro_tokens if row.micro_samples is None else row.micro_samples * width
            )
    reads = round(most * share)
    if role == "actor" and config.ptx.train_files:
        actor = config.actor_rollout_ref.actor
        of_ptx = actor.ppo_micro_batch_size_per_gpu * longest_row(config)
        if actor.use_dynamic_bsz:
            of_ptx = most
        return max(most, of_ptx), max(reads, of_ptx)  # every token of a text is in the loss
    return most, reads


def _rollout(config: PPOConfig, device_type: str, device_bytes: int | None) -> RoleMemory:
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
    ranks = sum(config.resource_pool_spec[pools["rollout"]])
    is_whole = ranks == 1 or policy.actor.strategy == "ddp"
    beside_actor = pools["actor"] == pools["rollout"]
    may_share = rollout.name == "native" and not rollout.quantization
    if may_share and beside_actor and is_whole and dtype == kept:
        weights = 0  # the actor's own module
    types = " / ".join(filter(None, [rollout.quantization, name_of(dtype)]))
    return RoleMemory("rollout", pools["rollout"], types, weights=weights, kv_cache=cache)


def pool_bytes(roles: list[RoleMemory]) -> dict[str, float]:
    """Bytes on a device of each pool: what its roles keep, and the largest call."""
    pools: dict[str, float] = {}
    for pool in dict.fromkeys(role.pool for role in roles):
        own = [role for role in roles if role.pool == pool]
        pools[pool] = sum(role.kept for role in own) + max(role.call for role in own)
    return pools


HEAD = (
    *("role", "pool", "weights / compute", "weights", "gradients", "moments"),
    *("whole layers", "activations", "KV cache", "of it in host memory"),
)


def memory_table(
    config: PPOConfig,
    device_type: str,
    device_bytes: int | None = None,
    max_columns: int | None = None,
) -> str:
    """The table of `role_memories`, GiB on each device, and the sum of every pool."""
    roles = role_memories(config, device_type, device_bytes)
    lines: list[tuple[str, ...]] = [HEAD]
    for role in roles:
        numbers = (role.weights, role.gradients, role.moments, role.whole, role.activations)
        cells = [_gib(number) for number in (*numbers, role.kv_cache, role.host)]
        lines.append((role.role, role.pool, role.types, *cells))
    sums = [
        f"{pool}: {_gib(total)} GiB on each device at most" + _beside(total, device_bytes)
        for pool, total in pool_bytes(roles).items()
    ]
    title = f"Memory (GiB on each device, {device_type}, from shapes; rows of full length)"
    sums.append(f"attention: {attention_of(config, device_type)}")
    return "\n".join([title, *draw_table(lines, max_columns, 3, flush_right=True), *sums])


def _gib(number: float | None) -> str:
    if number is None:
        return "?"
    return f"{number / GIB:.1f}" if number >= GIB / 10 or not number else f"{number / GIB:.4f}"


def _beside(total: float, device_bytes: int | None) -> str:
    if device_bytes is None:
        return ""
    verdict = "fits" if total <= device_bytes else "does NOT fit"
    return f", of {device_bytes / GIB:.1f}: {verdict}"


def check_memory(config: PPOConfig, device_type: str, device_bytes: int | None) -> None:
    """Refuse a run whose roles do not fit on their devices."""
    if device_bytes is None:
        return
    roles = role_memories(config, device_type, device_bytes)
    for pool, total in pool_bytes(roles).items():
        if total > device_bytes:
            parts = "; ".join(_story(role) for role in roles if role.pool == pool)
            raise ConfigError(
                f"Pool {pool!r} does not fit: its roles take {_gib(total)} GiB on each device, "
                f"which has {_gib(device_bytes)}. {parts}. {WAYS_OUT}"
            )


WAYS_OUT = (
    "Take smaller passes (ppo_micro_batch_size_per_gpu, or ppo_max_token_len_per_gpu), "
    "model.enable_gradient_checkpointing=true, fsdp_config.param_offload and optimizer_offload, a "
    "lower rollout.gpu_memory_utilization or kv_cache_gb, or more devices."
)


def _story(role: RoleMemory) -> str:
    return f"{role.role}: {_gib(role.kept)} kept, {_gib(role.call)} in a call"


def memory_of_this_gpu(device_type: str) -> int | None:
    """Bytes of the first GPU that this process sees; None where it sees none."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


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
        return memory_table(config, device_type, device_bytes, max_columns)
    except (ConfigError, OSError, ValueError) as error:
        return f"Memory: not known: {error}"
