"""The PPO recipe. Read `trainer.ppo.stages` first. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.ppo.stages import PPOTrainer

__all__ = ["PPOTrainer"]


def __getattr__(name: str) -> Any:
    """Import the trainer on first use."""
    if name != "PPOTrainer":
        raise AttributeError(f"module 'trainer.ppo' has no attribute '{name}'")
    from trainer.ppo.stages import PPOTrainer

    return PPOTrainer


def __dir__() -> list[str]:
    """Return the importable names, which an error about a misspelled name lists."""
    return __all__
