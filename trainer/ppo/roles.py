"""The roles of a run: which models they hold and how they score, as their classes declare.

The printed dataflow, the tables of sizes and memory, the checks before a process starts and the
score stage of the step use these declarations. If a user's class has no `role_model`, the
declarations of the recipe's class for that role apply.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from trainer.groups.worker_groups import worker_class
from verl_like.calls.dispatch import registered_methods
from verl_like.placement.pools import expand_roles
from verl_like.registry import load_object
from workers.columns import declared_columns
from workers.training.role_model_spec import RoleModelSpec

if TYPE_CHECKING:
    from workers.config import RolloutConfig


@functools.cache
def recipe_workers() -> dict[str, str]:
    """Return the worker classes of PPO's own roles, from its YAML."""
    tree: Any = OmegaConf.load(Path(__file__).with_name("ppo_trainer.yaml"))
    return dict(tree.role_workers)


def declaring_class(config: Any, role: str, without_users: bool = False) -> Any:
    """Return the class whose declarations apply to the role.

    With `without_users`, no user code is imported, so that a configuration can be checked on a
    machine that lacks this code. The result is then None for the user's own roles.
    """
    recipes_own = recipe_workers().get(config.kind_of(role))
    is_users = not config.role_workers.get(role, "").startswith("workers.")
    if not (without_users and is_users):
        cls = worker_class(config, role)
        if recipes_own is None or hasattr(cls, "role_model"):
            return cls
    return None if recipes_own is None else load_object(recipes_own, role)


def declared_models(config: Any, without_users: bool = False) -> dict[str, RoleModelSpec]:
    """Map each role to the model that it declares; rollouts are not included."""
    models = {}
    for role in expand_roles(config.role_mapping):
        cls = declaring_class(config, role, without_users)
        role_model = getattr(cls, "role_model", None)
        if role_model is not None:
            models[role] = role_model(config.for_role(role), config.kind_of(role))
    return models


def rollout_configs(config: Any) -> list[RolloutConfig]:
    """Return the rollout configuration of each role that generates; configurations may differ."""
    roles = [
        role for role in expand_roles(config.role_mapping) if config.kind_of(role) == "rollout"
    ]
    return [config.for_role(role).actor_rollout_ref.rollout for role in roles]


@dataclass(frozen=True)
class ScoringCall:
    """One call in which a role that is not a reward scores samples."""

    role: str
    method: str
    writes: Sequence[str]

    @property
    def column(self) -> str:
        """The column whose presence shows that the call was made."""
        return self.writes[0]


def scoring_calls(config: Any) -> list[ScoringCall]:
    """Return the calls that score samples, in the order in which roles are constructed.

    Copies of a role (`RunConfig.kind_of`) are not listed.
    """
    roles = expand_roles(config.role_mapping)
    calls = []
    for role in config.role_workers:
        if role not in roles or config.kind_of(role) != role:
            continue
        cls = declaring_class(config, role)
        for method, _, _ in registered_methods(cls):
            columns = declared_columns(cls, method)
            if columns is not None and columns.scores:
                calls.append(ScoringCall(role, method, columns.writes))
    return calls
