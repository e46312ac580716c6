"""Tokens of a pass that fit on the devices, before a process is started."""

from __future__ import annotations

from trainer.groups.nodes import joined_cluster
from trainer.memory import GIB, pool_bytes
from trainer.ppo.config import PPOConfig
from trainer.ppo.memory import role_memories
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from verl_like.process.machine import memory_gb
from workers.config.passes import fewest_tokens_per_pass, tokens_per_pass

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
