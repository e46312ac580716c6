"""The PPO recipe. Read `trainer.ppo.stages` first. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_like.lazy import import_name, names_by_block

if TYPE_CHECKING:  # `X as X` tells type checkers that the name is public
    from trainer.ppo.stages import PPOTrainer as PPOTrainer

[_MODULE_OF] = names_by_block(__file__)
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    return import_name(__name__, _MODULE_OF, name)


def __dir__() -> list[str]:
    """Return the importable names, which an error about a misspelled name lists."""
    return __all__
