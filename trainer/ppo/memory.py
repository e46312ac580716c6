"""Memory of PPO's roles per device: the table in the plan, and the largest passes that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from trainer.config.devices import Devices, devices_of
from trainer.groups.nodes import joined_cluster
from trainer.memory import (
    UNKNOWN,
    check_fit,
    fits,
    memory_table,
    model_memory,
    with_fewest_recomputed_layers,
)
from trainer.ppo.config import PPOConfig
from trainer.ppo.roles import models_of
from trainer.ppo.sizes import SizeRow, rows_of
from trainer.ppo.updating import longest_row
from verl_like.config_key import changed
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from verl_like.process.machine import memory_gib
from workers.config import fewest_tokens_per_pass, is_actors_module, model_rewards, tokens_per_pass
from workers.memory import (
    GIB,
    LargestPass,
    RoleMemory,
    rollout_memory,
    sync_bytes,
)
from workers.parallel.sharding import dims_of

P = TypeVar("P", bound=PPOConfig)

SHARE_OF_A_MACHINE = 0.5
"""Fraction of a machine's memory for which the passes of a CPU run are sized."""
WAYS_OUT = {
    "activations": "use smaller passes (ppo_micro_batch_size_per_gpu, or "
    "ppo_max_token_len_per_gpu, of actor_rollout_ref.actor and critic), or set "
    "actor_rollout_ref.model.enable_gradient_checkpointing=true if it is false",
    "model states": "set param_offload and optimizer_offload in the roles' fsdp_config, or use "
    "more devices",
    "KV cache": "lower actor_rollout_ref.rollout.gpu_memory_utilization or "
    "actor_rollout_ref.rollout.kv_cache_gib",
}


def role_memories(
    config: PPOConfig,
    device_type: str,
    device_bytes: int | None = None,
    tokens_at_once: int | None = None,
) -> list[RoleMemory]:
    """Return the memory of every role that holds a model.

    `tokens_at_once` is the number of tokens per pass with dynamic batch sizes; by default, the
    configured number.
    """
    pools, models = expand_roles(config.role_mapping), models_of(config)
    rows, memories = rows_of(config, tokens_at_once), []
    for role, pool in pools.items():
        beside_actor = pool == pools["actor"]
        if config.kind_of(role) == "rollout":
            memory = rollout_memory(
                config.of_role(role).actor_rollout_ref,
                config.data.max_prompt_length + config.data.max_response_length,
                role,
                pool,
                device_type,
                device_bytes,
                sum(config.resource_pool_spec[pool]) if beside_actor else None,
                config.axes(config.actor_rollout_ref.actor.parallel),
            )
            memories.append(memory)
        elif role == "ref" and beside_actor and is_actors_module(config.actor_rollout_ref):
            continue
        elif role in models:
            largest = largest_pass(config, role, rows)
            memories.append(model_memory(config, role, models[role], device_type, largest))

    # an engine and the other roles of its pool may need memory at the same time
    by_role = {memory.role: memory for memory in memories}
    engine, actor = by_role.get("rollout"), by_role.get("actor")
    if engine is None:
        return memories
    rests = engine_rests(config, device_type)
    if engine.weights and actor is not None and actor.pool == engine.pool:
        engine = replace(engine, sync=sync_bytes(models_of(config)["actor"], actor, device_type))
    by_role["rollout"] = replace(engine, sleeps=rests)
    for role in model_rewards(config) if rests else ():  # they may score between generations
        if role in by_role and by_role[role].pool == engine.pool:
            by_role[role] = replace(by_role[role], beside_engine=True)
    return list(by_role.values())


def engine_rests(config: PPOConfig, device_type: str) -> bool:
    """Return whether the rollout sleeps from the last sample of a step until the next weight sync.

    It sleeps if other roles compute on its GPUs meanwhile.
    """
    pools = expand_roles(config.role_mapping)
    shares = list(pools.values()).count(pools.get("rollout", "")) > 1
    return shares and may_rest(config, device_type)


def may_rest(config: PPOConfig, device_type: str) -> bool:
    """Return whether the rollout would sleep if it shared its GPUs."""
    is_here = not config.actor_rollout_ref.rollout.server_urls
    in_turns = not config.generates_while_training
    return is_here and in_turns and device_type == "cuda"


def largest_pass(
    config: PPOConfig, role: str, rows: Sequence[SizeRow] | None = None
) -> LargestPass:
    """Return the role's largest pass if all rows have full length.

    `rows` are the parts of a step; by default, the parts that the configuration gives.
    """
    width = config.data.max_prompt_length + config.data.max_response_length
    share = config.data.max_response_length / width
    ranks = sum(config.resource_pool_spec[expand_roles(config.role_mapping)[role]])
    dims = dims_of(ranks, models_of(config)[role].sharding)
    width = -(-width // dims.sp)
    most, text_tokens = {True: 0, False: 0}, 0
    for row in rows_of(config) if rows is None else rows:
        if row.role == role:
            num_samples = row.prompts * config.actor_rollout_ref.rollout.n
            at_once = row.micro_samples * width if row.micro_samples else row.micro_tokens
            tokens = min(at_once, -(-num_samples // dims.data_size) * width)
            most[row.trains] = max(most[row.trains], tokens)
            text_tokens = max(text_tokens, row.trains * row.micro_tokens)
    trained, read = most[True], most[False]
    if config.kind_of(role) in model_rewards(config):  # the role returns one number per row
        return LargestPass(read // width * width, read // width)
    reading = LargestPass(read, round(read * share))
    if not trained:
        return reading
    reads = round(trained * share)
    if role == "actor" and config.ptx.train_files:  # in PTX rows every token is in the loss
        actor = config.actor_rollout_ref.actor
        of_texts = actor.ppo_micro_batch_size_per_gpu * -(-longest_row(config) // dims.sp)
        if actor.use_dynamic_bsz:
            of_texts = text_tokens
        trained, reads = max(trained, of_texts), max(reads, of_texts)
    return LargestPass(trained, reads, reading)


def check_memory(config: PPOConfig, devices: Devices) -> None:
    """Raise if the roles do not fit on their devices with the passes that the run would use."""
    if devices.bytes is not None:
        config = _with_fitting_tokens(config, devices)  # recomputes all layers by default
        roles = role_memories(config, devices.type, devices.bytes)
        check_fit(roles, devices.type, devices.bytes, WAYS_OUT)


def plan_text(config: PPOConfig, brief: bool = False, heading: str = "Memory") -> str:
    """Return the memory table of the printed plan, or the reason why it cannot be computed."""
    devices = devices_of(config.trainer)
    try:
        roles = role_memories(fit_passes(config, devices), devices.type, devices.bytes)
        table = memory_table(roles, devices, brief, heading)
        if config.trainer.backend == "ray":
            from trainer.ppo.object_store import describe_store

            table = f"{table}\n{describe_store(config)}"
        return table
    except (ConfigError, OSError, ValueError) as error:
        return f"{UNKNOWN}: {error}"


def fit_passes(config: P, devices: Devices) -> P:
    """Return the configuration with passes, and a number of recomputed layers, that fit."""
    config = _with_fitting_tokens(config, devices)
    return with_fewest_recomputed_layers(
        config,
        devices,
        models_of(config),
        lambda tried: role_memories(tried, devices.type, devices.bytes),
    )


def _with_fitting_tokens(config: P, devices: Devices) -> P:
    tokens = tokens_that_fit(config, devices)
    if tokens is None:
        return config
    return changed(config, {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": tokens})


def tokens_that_fit(config: PPOConfig, devices: Devices) -> int | None:
    """Return the number of tokens per pass that fits on every pool, or None for the default.

    The default is halved until it fits, but not below the longest row. Return None if the default
    fits, if the user has set a size, if passes are sized by samples, or if the memory of devices or
    models is not known.
    """
    actor = config.actor_rollout_ref.actor
    if not actor.use_dynamic_bsz or actor.ppo_max_token_len_per_gpu is not None:
        return None
    device_bytes = devices.bytes
    if devices.type == "cpu":
        device_bytes = _share_of_this_machine(config)
    pools = set(expand_roles(config.role_mapping).values())
    if device_bytes is None or not pools <= config.resource_pool_spec.keys():
        return None  # the plan reports a missing pool in more detail

    fewest, default = fewest_tokens_per_pass(config), tokens_per_pass(config)
    tokens = default
    try:
        while tokens > fewest:
            memories = role_memories(config, devices.type, device_bytes, tokens)
            if fits(memories, devices.type, device_bytes):
                break
            tokens = max(fewest, tokens // 2)
    except (ConfigError, OSError, ValueError):  # the memory cannot be computed
        return None
    return tokens if tokens < default else None


def _share_of_this_machine(config: PPOConfig) -> int | None:
    """Return the bytes that each process of the run may use on a machine without GPUs.

    Return None on a cluster, whose machines may differ from the driver's.
    """
    total = memory_gib("MemTotal:")
    if total is None or (joined_cluster(config) and config.trainer.backend == "ray"):
        return None
    processes = sum(map(sum, config.resource_pool_spec.values()))
    return int(SHARE_OF_A_MACHINE * total * GIB / max(processes, 1))
