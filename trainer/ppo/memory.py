"""Memory of PPO's roles on a device: shown in the plan, and held against the device's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainer.config.devices import Devices, devices_of
from trainer.groups.nodes import joined_cluster
from trainer.memory import (
    check_fit,
    held_memory,
    memory_table,
)
from trainer.ppo.config import PPOConfig
from trainer.ppo.roles import models_of
from trainer.ppo.sizes import rows_of
from trainer.ppo.update import longest_row
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from verl_like.process.machine import memory_gb
from workers.config import is_actors_module, model_rewards
from workers.config.passes import fewest_tokens_per_pass, tokens_per_pass
from workers.memory import (
    GIB,
    LargestPass,
    RoleMemory,
    pool_bytes,
    rollout_memory,
    sync_bytes,
)
from workers.parallel.dims import ParallelDims
from workers.parallel.sharding import dims_of


def role_memories(
    config: PPOConfig, device_type: str, device_bytes: int | None = None
) -> list[RoleMemory]:
    """Of every role with a model."""
    pools, models, found = expand_roles(config.role_mapping), models_of(config), []
    for role, pool in pools.items():
        beside_actor = pool == pools["actor"]
        if config.kind_of(role) == "rollout":
            found.append(
                rollout_memory(
                    config.of_role(role).actor_rollout_ref,
                    config.data.max_prompt_length + config.data.max_response_length,
                    role,
                    pool,
                    device_type,
                    device_bytes,
                    sum(config.resource_pool_spec[pool]) if beside_actor else None,
                )
            )
        elif role == "ref" and beside_actor and is_actors_module(config.actor_rollout_ref):
            continue
        elif role in models:
            largest = largest_pass(config, role)
            found.append(held_memory(config, role, models[role], device_type, largest))
    return _beside_engine(config, found, device_type)


def engine_rests(config: PPOConfig, device_type: str) -> bool:
    """Whether the rollout sleeps from when a step's samples are made until its next weights come:
    where other roles compute on its GPUs meanwhile."""
    pools = expand_roles(config.role_mapping)
    shares = list(pools.values()).count(pools.get("rollout", "")) > 1
    return shares and may_rest(config, device_type)


def may_rest(config: PPOConfig, device_type: str) -> bool:
    """Whether it would, if it shared them."""
    is_here = not config.actor_rollout_ref.rollout.server_urls
    in_turns = not getattr(config, "generates_beside_training", False)
    return is_here and in_turns and device_type == "cuda"


def _beside_engine(
    config: PPOConfig, memories: Sequence[RoleMemory], device_type: str
) -> list[RoleMemory]:
    """With what an engine and those on its pool take of it at the same time."""
    by_role = {memory.role: memory for memory in memories}
    engine, actor = by_role.get("rollout"), by_role.get("actor")
    if engine is None:
        return list(memories)
    rests = engine_rests(config, device_type)
    if engine.weights and actor is not None and actor.pool == engine.pool:
        engine = replace(engine, sync=sync_bytes(models_of(config)["actor"], actor, device_type))
    by_role["rollout"] = replace(engine, sleeps=rests)
    for role in model_rewards(config) if rests else ():  # more samples may be drawn after them
        if role in by_role and by_role[role].pool == engine.pool:
            by_role[role] = replace(by_role[role], beside_engine=True)
    return list(by_role.values())


def largest_pass(config: PPOConfig, role: str) -> LargestPass:
    """The role's largest pass, all rows of full length, and of a trained role's that only read."""
    width = config.data.max_prompt_length + config.data.max_response_length
    share = config.data.max_response_length / width
    dims = _dims_of_role(config, role)
    width = -(-width // dims.sp)
    most = {True: 0, False: 0}
    for row in rows_of(config):
        if row.role == role:
            num_samples = row.prompts * config.actor_rollout_ref.rollout.n
            at_once = row.micro_samples * width if row.micro_samples else row.micro_tokens
            tokens = min(at_once, -(-num_samples // dims.data_size) * width)
            most[row.trains] = max(most[row.trains], tokens)
    trained, read = most[True], most[False]
    if config.kind_of(role) in model_rewards(config):  # a row has one number
        return LargestPass(read // width * width, read // width)
    alone = LargestPass(read, round(read * share))
    if not trained:
        return alone
    reads = round(trained * share)
    if role == "actor" and config.ptx.train_files:
        actor = config.actor_rollout_ref.actor
        of_ptx = actor.ppo_micro_batch_size_per_gpu * -(-longest_row(config) // dims.sp)
        if actor.use_dynamic_bsz:
            of_ptx = tokens_per_pass(config)
        # every token of a text is in the loss
        trained, reads = max(trained, of_ptx), max(reads, of_ptx)
    return LargestPass(trained, reads, alone)


def _dims_of_role(config: PPOConfig, role: str) -> ParallelDims:
    """The axes of the role's ranks."""
    ranks = sum(config.resource_pool_spec[expand_roles(config.role_mapping)[role]])
    return dims_of(ranks, models_of(config)[role].sharding)


def check_memory(config: PPOConfig, devices: Devices) -> None:
    """Refuse a run whose roles do not fit on their devices."""
    if devices.bytes is not None:
        check_fit(role_memories(config, devices.type, devices.bytes), devices.bytes, WAYS_OUT)


WAYS_OUT = (
    "Take smaller passes (ppo_micro_batch_size_per_gpu, or ppo_max_token_len_per_gpu), "
    "model.enable_gradient_checkpointing=true, fsdp_config.param_offload and optimizer_offload, a "
    "lower rollout.gpu_memory_utilization or kv_cache_gb, or more devices."
)


def plan_text(config: PPOConfig, max_columns: int | None = None, brief: bool = False) -> str:
    """The table for the plan, or why there is none."""
    devices = devices_of(config.trainer)
    try:
        roles = role_memories(config, devices.type, devices.bytes)
        return memory_table(roles, devices, max_columns, brief)
    except (ConfigError, OSError, ValueError) as error:
        return f"Memory: not known: {error}"


SHARE_OF_A_MACHINE = 0.5
"""Of a machine's memory, what the processes of a run on CPUs may plan with together."""


def fit_passes(config: PPOConfig, devices: Devices) -> None:
    """Write a smaller `ppo_max_token_len_per_gpu` where the default would not fit on a device.

    Half as many tokens at a time, down to the longest row. What the user has set stays, and so does
    the default where the memory of the devices is not known.
    """
    actor = config.actor_rollout_ref.actor
    if not actor.use_dynamic_bsz or actor.ppo_max_token_len_per_gpu is not None:
        return
    device_bytes = devices.bytes
    if devices.type == "cpu":
        device_bytes = _share_of_this_machine(config)
    pools = set(expand_roles(config.role_mapping).values())
    if device_bytes is None or not pools <= config.resource_pool_spec.keys():
        return  # of a pool that is not there the plan will say more

    fewest, default = fewest_tokens_per_pass(config), tokens_per_pass(config)
    tokens = default
    while tokens > fewest and not _fits(config, tokens, devices.type, device_bytes):
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
