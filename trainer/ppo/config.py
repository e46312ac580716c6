"""The configuration of a PPO run."""

from __future__ import annotations

from trainer.config.schema import FilterGroupsConfig, KLControlConfig, PPOConfig

__all__ = ["FilterGroupsConfig", "KLControlConfig", "PPOConfig"]
