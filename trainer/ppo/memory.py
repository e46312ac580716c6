"""Sizes of a PPO step: rows and tokens per call, memory per device, and the passes that fit.

The number of prompts, samples and tokens of each call is in total, per rank and per micro-batch.
`verl-like check --full` prints the tables. Token counts are upper bounds: they assume prompts and
responses of full length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from trainer.config.devices import Devices, run_devices
from trainer.groups.nodes import joined_cluster
from trainer.memory import (
    UNKNOWN,
    check_fit,
    fits,
    memory_table,
    model_memory,
    size_text,
    with_fewest_recomputed_layers,
)
from trainer.ppo.config import PPOConfig
from trainer.ppo.roles import declared_models
from trainer.ppo.updating import longest_row
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError
from verl_like.placement.pools import expand_roles
from verl_like.process.machine import memory_gib
from verl_like.terminal import draw_table
from workers.config import fewest_tokens_per_pass, is_actors_module, model_rewards, tokens_per_pass
from workers.memory import GIB, LargestPass, RoleMemory, rollout_memory, sync_bytes
from workers.parallel.sharding import ParallelDims, dims_of
from workers.training.role_model_spec import RoleModelSpec

if TYPE_CHECKING:
    from trainer.stubs import CallNode


P = TypeVar("P", bound=PPOConfig)

TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
"""The key of the tokens per pass."""
SHARE_OF_A_MACHINE = 0.5
"""Fraction of a machine's memory for which the passes of a CPU run are sized."""
REMEDIES = {
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
                config.for_role(role).actor_rollout_ref,
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
    rests = engine_sleeps(config, device_type)
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


def engine_sleeps(config: PPOConfig, device_type: str) -> bool:
    """Return whether the rollout sleeps from the last sample of a step until the next weight sync.

    It sleeps if other roles compute on its GPUs meanwhile.
    """
    pools = expand_roles(config.role_mapping)
    shares = list(pools.values()).count(pools.get("rollout", "")) > 1
    return shares and engine_may_sleep(config, device_type)


def engine_may_sleep(config: PPOConfig, device_type: str) -> bool:
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
    for call in sizes_of_step(config) if sizes is None else sizes:
        if call.role == role:
            at_once = call.pass_samples * width if call.pass_samples else call.pass_tokens
            tokens = min(at_once, -(-call.samples // dims.data_size) * width)
            most[call.trains] = max(most[call.trains], tokens)
            text_tokens = max(text_tokens, call.trains * call.pass_tokens)
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
        check_fit(roles, devices.type, devices.bytes, REMEDIES)


def plan_text(config: PPOConfig, brief: bool = False, heading: str = "Memory") -> str:
    """Return the memory table of the printed plan, or the reason why it cannot be computed."""
    devices = run_devices(config.trainer)
    try:
        roles = role_memories(fit_passes(config, devices), devices.type, devices.bytes)
        table = memory_table(roles, devices, brief, heading)
        if config.trainer.backend == "ray":
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


@dataclass(frozen=True)
class CallSize:
    """The samples of a call or, if it trains, of an optimizer step, and of its passes on a rank.

    A pass has `pass_samples`, or `pass_tokens` if `pass_samples` is None.
    """

    role: str
    method: str
    samples: int
    pass_samples: int | None
    pass_tokens: int

    @property
    def trains(self) -> bool:
        """True for a call that updates a model."""
        return self.method.startswith("update_")


def call_sizes(config: PPOConfig, nodes: Sequence[CallNode]) -> list[CallSize]:
    """Return the sizes of the calls that have a batch, of rollouts and of roles with a model."""
    models = declared_models(config)
    return [
        call_size(config, models.get(role), role, node.method, node.samples)
        for node in nodes
        for role in node.roles
        if node.samples and (role in models or config.kind_of(role) == "rollout")
    ]


def call_size(
    config: PPOConfig, model: RoleModelSpec | None, role: str, method: str, samples: int
) -> CallSize:
    """Return the size of a call of a role with this number of samples; a rollout has no model."""
    if model is None:
        rollout = config.for_role(role).actor_rollout_ref.rollout
        return CallSize(role, method, samples, rollout.max_num_seqs, 0)
    actor, reward = config.actor_rollout_ref.actor, model_rewards(config).get(config.kind_of(role))
    rows = model.rows if reward is None else actor.ppo_micro_batch_size_per_gpu
    if method.startswith("update_"):
        rows, samples = model.trained_rows, model.mini_batch or samples
    rows_of_reward = None if reward is None else reward.micro_batch_size_per_gpu
    at_once = rows_of_reward or (None if actor.use_dynamic_bsz else rows)
    return CallSize(role, method, samples, at_once, model.tokens or tokens_per_pass(config))


def batch_line(config: PPOConfig) -> str:
    """Return the sizes of a step in one line."""
    data, num_samples = config.data, config.actor_rollout_ref.rollout.n
    tokens = data.max_prompt_length + data.max_response_length
    return (
        f"Step: {data.train_batch_size:,} prompts x {num_samples} "
        f"sample{'s' if num_samples > 1 else ''}, up to {tokens:,} tokens each; mini-batches of "
        f"{config.actor_rollout_ref.actor.ppo_mini_batch_size:,} prompts"
    )


HEAD = ("", "ranks", "prompts", "samples", "per rank", "per pass", "tokens per pass")
BY_TOKENS = "by tokens"
"""The cell of the samples per pass if the tokens limit a pass."""


def batch_table(config: PPOConfig, nodes: Sequence[CallNode]) -> str:
    """Return the table of prompts, samples and tokens of these calls of a step."""
    width = config.data.max_prompt_length + config.data.max_response_length
    num_samples = config.actor_rollout_ref.rollout.n
    pools, models = expand_roles(config.role_mapping), declared_models(config)
    lines: list[tuple[str, ...]] = [HEAD]
    for call in call_sizes(config, nodes):
        ranks, model = sum(config.resource_pool_spec[pools[call.role]]), models.get(call.role)
        dims = ParallelDims(shard=ranks) if model is None else dims_of(ranks, model.sharding)
        on_rank = -(-call.samples // dims.data_size)
        micro = (BY_TOKENS, f"{min(call.pass_tokens, -(-on_rank * width // dims.sp)):,}")
        if call.pass_samples is not None:
            at_once = min(call.pass_samples, on_rank)
            micro = (f"{at_once:,}", f"{-(-at_once * width // dims.sp):,}")
        cells = (ranks, call.samples // num_samples, call.samples, on_rank)
        lines.append((f"{call.role}.{call.method}", *(f"{cell:,}" for cell in cells), *micro))
    title = (
        f"{num_samples} sample{'s' if num_samples > 1 else ''} per prompt, each up to {width:,} "
        "tokens (prompt and response); updates: a mini-batch"
    )
    return "\n".join([title, *draw_table(lines, flush_right=True, zero=BY_TOKENS)])


STORED_BYTES = 200
"""Bytes per token of a step, measured with critic and reference."""


def describe_store(config: PPOConfig) -> str:
    """Describe the bytes of a step in Ray's object store."""
    data, ray = config.data, config.ray
    width = data.max_prompt_length + data.max_response_length
    num_bytes = data.train_batch_size * config.actor_rollout_ref.rollout.n * width * STORED_BYTES
    room = "" if ray.object_store_gib is None else f" of {ray.object_store_gib:g} GiB"
    return f"Ray's object store on the driver's node: about {size_text(num_bytes)}{room} per step"
