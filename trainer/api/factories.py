"""A model that is made by a function, and several models of one run by their roles.

    PPO(model=make_policy, ...)                                    # def make_policy(): return ...
    PPO(model={"actor": policy, "critic": value_model}, ...)
    PPO(model=make_all, ...)                                       # which returns such a dict

The function runs once, before the run folder is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_like.errors import ConfigError, nearest


def models_by_role(model: Any, roles: Sequence[str]) -> dict[str, Any]:
    """Role -> what is given for it; the first of `roles` is that of a model alone."""
    given = _called(model, roles) if _is_function(model) else model
    if not isinstance(given, Mapping):
        return {roles[0]: given}

    for role, one in given.items():
        if role not in roles:
            raise ConfigError(
                f"model names the role {role!r}, which this recipe loads no model for: "
                f"{', '.join(roles)}.{nearest(str(role), roles)}"
            )
        if one is None:
            raise ConfigError(f"model has None for the role {role}: {_wanted(roles)}")
    if roles[0] not in given:
        raise ConfigError(f"model has no {roles[0]}, only {', '.join(given) or 'no role at all'}.")
    return dict(given)


def _is_function(model: Any) -> bool:
    return callable(model) and not isinstance(model, torch.nn.Module | Mapping)


def _called(function: Any, roles: Sequence[str]) -> Any:
    name = getattr(function, "__name__", repr(function))
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(
            f"model={name} is called without arguments, and {error}. {_wanted(roles)}"
        ) from None
    except ValueError:  # a builtin without a signature says so itself
        pass
    made = function()
    if made is None:
        raise ConfigError(f"model={name} returned None. {_wanted(roles)}")
    return made


def _wanted(roles: Sequence[str]) -> str:
    if len(roles) == 1:
        return "Give a function that returns the model."
    return f"Give a function that returns the {roles[0]}'s model, or a dict of {', '.join(roles)}."
