"""Pools without which a run may begin."""

from __future__ import annotations

from collections.abc import Callable

from trainer.config.schema import RunConfig
from verl_like.config_key import changed
from verl_like.errors import InsufficientResourcesError


def without_absent_pools(config: RunConfig, plan: Callable[[RunConfig], object]) -> RunConfig:
    """Return the configuration without the last of the optional pools for which `plan` raises."""
    spec, mapping = dict(config.resource_pool_spec), dict(config.role_mapping)
    for pool in ["", *reversed(config.optional_pools)]:
        spec.pop(pool, None)
        mapping = {role: its_pool for role, its_pool in mapping.items() if its_pool != pool}
        fewer = changed(config, {"resource_pool_spec": spec, "role_mapping": mapping})
        try:
            plan(fewer)
        except InsufficientResourcesError:
            continue
        break
    return fewer
