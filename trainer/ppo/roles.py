"""The roles of a run, by what their classes declare: the models that they hold, how they score.

The printed dataflow, the tables of sizes and memory, the checks before a process starts and the
score stage of the step ask here. A class of the user's own that declares nothing counts as the
recipe's of that role.
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
from verl_like.placement.roles import expand_roles
from verl_like.registry import load_object
from workers.columns import columns_of
from workers.memory import HeldModel

if TYPE_CHECKING:
    from workers.config import RolloutConfig


@functools.cache
def recipe_workers() -> dict[str, str]:
    """The worker classes of PPO's own roles, by its YAML."""
    tree: Any = OmegaConf.load(Path(__file__).with_name("ppo_trainer.yaml"))
    return dict(tree.role_workers)


def declaring_class(config: Any, role: str, without_users: bool = False) -> Any:
    """The class that says what the role is; None where that is one of the user's that may not run.

    `without_users` leaves their code out: a configuration is checked where it cannot be imported.
    """
    recipes_own = recipe_workers().get(config.kind_of(role))
    is_users = not config.role_workers.get(role, "").startswith("workers.")
    if not (without_users and is_users):
        cls = worker_class(config, role)
        if recipes_own is None or hasattr(cls, "held_model"):
            return cls
    return None if recipes_own is None else load_object(recipes_own, role)


def models_of(config: Any, without_users: bool = False) -> dict[str, HeldModel]:
    """Role -> the model that it holds, of roles that hold one and declare it; not of rollouts."""
    models = {}
    for role in expand_roles(config.role_mapping):
        cls = declaring_class(config, role, without_users)
        held_model = getattr(cls, "held_model", None)
        if held_model is not None:
            models[role] = held_model(config.of_role(role), config.kind_of(role))
    return models


def rollouts_of(config: Any) -> list[RolloutConfig]:
    """What the roles that generate are told; they may differ."""
    roles = [
        role for role in expand_roles(config.role_mapping) if config.kind_of(role) == "rollout"
    ]
    return [config.of_role(role).actor_rollout_ref.rollout for role in roles]


@dataclass(frozen=True)
class Scoring:
    """What a role says of samples beside rewards: one call, with what it writes."""

    role: str
    method: str
    writes: Sequence[str]
    part: str
    """Its name in tables of sizes."""
    stage: str

    @property
    def column(self) -> str:
        """The column by which a batch shows that the call was made."""
        return self.writes[0]


def scorings_of(config: Any) -> list[Scoring]:
    """The calls that score samples, in the order of the roles' construction.

    Of several roles of one kind (`RunConfig.kind_of`) the first stands for all. What is written as
    samples are made is not written again by another role.
    """
    roles = expand_roles(config.role_mapping)
    found = []
    for role in config.role_workers:
        if role not in roles or config.kind_of(role) != role:
            continue
        cls = declaring_class(config, role)
        for method, _, _ in registered_methods(cls):
            said = columns_of(cls, method)
            if said is not None and said.scores_as:
                stage = config.reads_in(role)
                found.append(Scoring(role, method, said.writes, said.scores_as, stage))
    made = {each.column for each in found if each.stage == "gen"}
    return [each for each in found if each.stage == "gen" or each.column not in made]
