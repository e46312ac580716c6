"""The correction for a rollout that is not the policy, on by default where one is needed.

`correct_by_default` stands in PPO's `Recipe.complete`. What the user set wins, also to
switch it off: any key of `algorithm.rollout_correction`, or a preset (`correction=disabled`).
"""

from __future__ import annotations

from collections.abc import Collection

from trainer.ppo.config import PPOConfig
from workers.config import RolloutCorrectionConfig

SECTION = "algorithm.rollout_correction"


def needs_correction(config: PPOConfig) -> str:
    """Why the rollout draws from another policy than the trainer's; nothing is an empty text."""
    rollout = config.actor_rollout_ref.rollout
    key, quantization = "quantization", rollout.quantization
    if rollout.name == "vllm":
        key, quantization = "engine_kwargs.quantization", rollout.engine_kwargs.get("quantization")
    if quantization:
        return f"actor_rollout_ref.rollout.{key}={quantization} rounds the rollout's weights"
    return ""


def correct_by_default(config: PPOConfig, keys: Collection[str], reason: str = "") -> list[str]:
    """Weigh every token by a truncated importance weight, where the user has decided nothing.

    That is the decoupled objective: PPO's ratio is to the policy before the update, and the weight
    leads from the policy that drew a token to that one. A recipe may have a `reason` of its own.
    """
    reason = reason or needs_correction(config)
    correction = config.algorithm.rollout_correction
    is_set = any(key == "correction" or key.startswith(SECTION) for key in keys)
    if not reason or is_set or correction != RolloutCorrectionConfig():
        return []

    correction.rollout_is = "token"
    return [
        f"notice: {reason}, so {SECTION}.rollout_is=token (at most "
        f"{correction.rollout_is_threshold}), as correction=decoupled_token_is sets it; "
        "correction=disabled turns it off"
    ]
