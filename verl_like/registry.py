"""Named parts that a config chooses: look a name up in its registry, or import the user's own by
dotted path.

A registry is a plain dict that prints. Callers: `trainer.ppo.advantages.estimators` (estimators),
`workers.losses.losses` (policy losses).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TypeVar

from verl_like.errors import ConfigError, nearest

T = TypeVar("T")


def look_up(name: str, registry: Mapping[str, T], kind: str) -> T:
    """The entry of that name, or the object at a dotted path such as
    `my_package.my_module.my_function`.
    """
    if name in registry:
        return registry[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ConfigError(
            f"unknown {kind} {name!r}; there are {', '.join(sorted(registry))}, and any function "
            f"by its dotted path.{nearest(name, registry)}"
        )
    try:
        found: T = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{kind} {name!r} cannot be imported ({error}); is its folder on PYTHONPATH on every "
            "node?"
        ) from error
    return found
