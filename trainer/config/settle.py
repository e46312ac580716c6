"""From a composed configuration to a run's configuration: `settle`, a pure function.

    config, notices = settle(recipe, composed, keys)

Each step takes a configuration and returns another. The result is read-only. Values that depend on
files and devices, such as the largest passes, are settled in the same way when the run starts
(`Trainer.settled`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from trainer.config.devices import devices_of, with_simulated
from trainer.config.keys import path_to, read
from trainer.config.placement import drop_preset_names, names_below, place_roles
from trainer.config.recipe import Recipe
from trainer.config.schema import RunConfig
from trainer.config.unused_keys import notice_of, unused_among, unused_in_items
from verl_like.config_key import changed, freeze
from workers.config.rollout import RolloutConfig

C = TypeVar("C", bound=RunConfig)
SEQUENCES_ON_GPUS, BUCKET_MB_ON_GPUS = 1024, 512.0
"""Defaults of `max_num_seqs` for vLLM and of the buckets of weights, where devices are GPUs."""


def settle(recipe: Recipe[C], composed: C, keys: Collection[str]) -> tuple[C, list[str]]:
    """Return the read-only configuration of the run, and notices to show.

    `keys` are those that the user set. A key that this run does not read gets a notice and its
    default value, so that it cannot have an effect anywhere. Roles that cannot work are errors.
    """
    unused: dict[str, list[str]] = {}
    left = set(keys)
    while True:
        config, notices = _settled(recipe, composed, keys)
        new_unused = unused_among(config, [key for key in keys if key in left])
        if not new_unused:
            notices += [notice_of(names, reason) for reason, names in unused.items()]
            return freeze(config), [*notices, *unused_in_items(config, keys)]
        for reason, names in new_unused.items():
            unused.setdefault(reason, []).extend(names)
        unread = {name for names in new_unused.values() for name in names}
        left -= unread
        composed = _without(composed, unread)


def _settled(recipe: Recipe[C], composed: C, keys: Collection[str]) -> tuple[C, list[str]]:
    config = with_simulated(composed, keys)
    config, about_engine = _with_engine(config, keys)
    named_roles = names_below("role_mapping", keys)
    mapping = drop_preset_names(config.role_mapping, named_roles)
    config, completed = recipe.complete(changed(config, {"role_mapping": mapping}), keys)
    config, placed = place_roles(recipe, config, keys)
    return config, [*about_engine, *completed, *placed]


def _without(config: C, keys: Collection[str]) -> C:
    """Return the configuration with the defaults of these keys, and without these arguments."""
    schema, default = type(config), type(config)()
    for name in keys:
        for key in path_to(schema, name)[-1:]:
            value = read(default, key.name)
            if key.rules.arguments_of and name != key.name:
                value = dict(read(config, key.name))
                value.pop(name.removeprefix(f"{key.name}."), None)
            config = changed(config, {key.name: value})
    return config


def _with_engine(config: C, keys: Collection[str]) -> tuple[C, list[str]]:
    """Choose the engine of a recipe that generates, and its sizes, unless the user has set them."""
    policy = getattr(config, "actor_rollout_ref", None)
    rollout = getattr(policy, "rollout", None)
    if not isinstance(rollout, RolloutConfig):
        return config, []
    from workers.rollout.build import engine_for, notices_of_engine

    device_type = devices_of(config.trainer).type
    name = engine_for(rollout, device_type)
    changes: dict[str, Any] = {"actor_rollout_ref.rollout.name": name}
    if device_type == "cuda":
        sizes = {"update_weights_bucket_megabytes": BUCKET_MB_ON_GPUS}
        if name == "vllm" and not rollout.server_urls:
            sizes["max_num_seqs"] = SEQUENCES_ON_GPUS
        sizes = {f"actor_rollout_ref.rollout.{key}": value for key, value in sizes.items()}
        changes |= {key: value for key, value in sizes.items() if key not in keys}
    return changed(config, changes), notices_of_engine(name, device_type)
