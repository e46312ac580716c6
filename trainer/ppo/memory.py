"""Memory of PPO's roles per device: the table in the plan, and the largest passes that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from trainer.config.devices import Devices, run_devices
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
from trainer.ppo.roles import declared_models
from trainer.ppo.sizes import CallSize, call_size, call_sizes
from trainer.ppo.updating import longest_row
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError
from verl_like.placement.pools import expand_roles
from verl_like.process.machine import memory_gib
from workers.config import fewest_tokens_per_pass, is_actors_module, model_rewards, tokens_per_pass
from workers.memory import GIB, LargestPass, RoleMemory, rollout_memory, sync_bytes
from workers.parallel.sharding import dims_of

P = TypeVar("P", bound=PPOConfig)

TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
"""The key of the tokens per pass."""
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
    config: PPOConfig, device_type: str, device_bytes: int | None = None
) -> list[RoleMemory]:
    """Return the memory of every role that holds a model."""
    pools, models = expand_roles(config.role_mapping), declared_models(config)
    sizes, memories = sizes_of_step(config), []
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
            largest = largest_pass(config, role, sizes)
            memories.append(model_memory(config, role, models[role], device_type, largest))

    # an engine and the other roles of its pool may need memory at the same time
    by_role = {memory.role: memory for memory in memories}
    engine, actor = by_role.get("rollout"), by_role.get("actor")
    if engine is None:
        return memories
    rests = engine_rests(config, device_type)
    if engine.weights and actor is not None and actor.pool == engine.pool:
        engine = replace(
            engine, sync=sync_bytes(declared_models(config)["actor"], actor, device_type)
        )
    by_role["rollout"] = replace(engine, sleeps=rests)
    if rests:  # they may score between generations
        for role in model_rewards(config):
            if role in by_role and by_role[role].pool == engine.pool:
                by_role[role] = replace(by_role[role], beside_engine=True)
    return list(by_role.values())


def sizes_of_step(config: PPOConfig) -> list[CallSize]:
    """Return the sizes of the calls of a step of our class.

    If code of the user, such as an estimator, fails on stubs, every model also reads and, if it is
    trained, updates on the whole batch.
    """
    from trainer.launch import trainer_class
    from trainer.stubs import our_class, trace_step  # only plans import it

    nodes, problem = trace_step(config, our_class(trainer_class(config)))
    sizes = call_sizes(config, nodes)
    samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if problem:
        for role, model in declared_models(config).items():
            for method in ("forward", "update_model")[: 1 + model.trains]:
                sizes.append(call_size(config, model, role, method, samples))
    return sizes


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
    config: PPOConfig, role: str, sizes: Sequence[CallSize] | None = None
) -> LargestPass:
    """Return the role's largest pass if all rows have full length.

    `sizes` are the calls of a step; by default, those of our class.
    """
    width = config.data.max_prompt_length + config.data.max_response_length
    share = config.data.max_response_length / width
    ranks = sum(config.resource_pool_spec[expand_roles(config.role_mapping)[role]])
    dims = dims_of(ranks, declared_models(config)[role].sharding)
    width = -(-width // dims.sp)
    most, text_tokens = {True: 0, False: 0}, 0
    for size in sizes_of_step(config) if sizes is None else sizes:
        if size.role == role:
            at_once = size.pass_samples * width if size.pass_samples else size.pass_tokens
            tokens = min(at_once, -(-size.samples // dims.data_size) * width)
            most[size.trains] = max(most[size.trains], tokens)
            text_tokens = max(text_tokens, size.trains * size.pass_tokens)
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
    devices = run_devices(config.trainer)
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
        declared_models(config),
        lambda tried: role_memories(tried, devices.type, devices.bytes),
    )


def _with_fitting_tokens(config: P, devices: Devices) -> P:
    """Return the configuration with a number of tokens per pass that fits on every pool.

    The default is halved until it fits, but not below the longest row. The configuration stays as
    it is if the default fits, if the user has set a size, if passes are sized by samples, or if the
    memory of devices or models is not known.
    """
    actor = config.actor_rollout_ref.actor
    if not actor.use_dynamic_bsz or actor.ppo_max_token_len_per_gpu is not None:
        return config
    device_bytes = devices.bytes
    if devices.type == "cpu":
        device_bytes = _share_of_this_machine(config)
    pools = set(expand_roles(config.role_mapping).values())
    if device_bytes is None or not pools <= config.resource_pool_spec.keys():
        return config  # the plan reports a missing pool in more detail

    fewest, tokens, tried = fewest_tokens_per_pass(config), tokens_per_pass(config), config
    try:
        while tokens > fewest:
            memories = role_memories(tried, devices.type, device_bytes)
            if fits(memories, devices.type, device_bytes):
                break
            tokens = max(fewest, tokens // 2)
            tried = replace_keys(config, {TOKENS: tokens})
    except (ConfigError, OSError, ValueError):  # the memory cannot be computed
        return config
    return tried


def _share_of_this_machine(config: PPOConfig) -> int | None:
    """Return the bytes that each process of the run may use on a machine without GPUs.

    Return None on a cluster, whose machines may differ from the driver's.
    """
    total = memory_gib("MemTotal:")
    if total is None or (joined_cluster(config) and config.trainer.backend == "ray"):
        return None
    processes = sum(map(sum, config.resource_pool_spec.values()))
    return int(SHARE_OF_A_MACHINE * total * GIB / max(processes, 1))
