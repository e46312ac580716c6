"""The memory of a step in Ray's object store, for the printed plan."""

from __future__ import annotations

from trainer.memory import size
from trainer.ppo.config import PPOConfig

STORED_BYTES = 200
"""Bytes per token of a step, measured with critic and reference."""


def describe_store(config: PPOConfig) -> str:
    """Describe the bytes of a step in Ray's object store."""
    data, ray = config.data, config.ray
    width = data.max_prompt_length + data.max_response_length
    num_bytes = data.train_batch_size * config.actor_rollout_ref.rollout.n * width * STORED_BYTES
    room = "" if ray.object_store_gib is None else f" of {ray.object_store_gib:g} GiB"
    return f"Ray's object store on the driver's node: about {size(num_bytes)}{room} per step"
