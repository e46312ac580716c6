"""Models, sharding, rollout engines, and the roles that use them, in worker processes.

`trainer` defines the order of the calls. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_like.lazy import import_name, names_by_block

if TYPE_CHECKING:  # `X as X` tells type checkers that the name is public
    from workers.config import WorkersConfig as WorkersConfig
    from workers.roles.actor import ActorWorker as ActorWorker
    from workers.roles.critic import CriticWorker as CriticWorker
    from workers.roles.reference import ReferenceWorker as ReferenceWorker
    from workers.roles.reward_model import RewardModelWorker as RewardModelWorker
    from workers.roles.rollout import RolloutWorker as RolloutWorker

[_MODULE_OF] = names_by_block(__file__)
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    return import_name(__name__, _MODULE_OF, name)
