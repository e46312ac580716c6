"""usage: verl-like async algorithm=grpo actor_rollout_ref.model.path=FOLDER
           data.train_files=FILE reward=FILE.py:FUNCTION [key=value ...]

PPO that generates and trains at the same time: generators sample on their own
pools, and the trainer takes batches from a buffer and sends weights back. It
has all keys of `verl-like ppo`, such as algorithm=grpo (not placement=split: it
has its own pools), and:

  async_training.generators=2     number of generators
  async_training.max_staleness=1  weight versions that a sample may lag behind;
                                  0: synchronous
  verl-like async --cfg all       every key with its meaning
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from trainer.async_training.config import (
    ASYNC_TRAINER,
    GENERATOR_SETTINGS,
    ROLLOUT_WORKER,
    AsyncConfig,
    GeneratorSettings,
)
from trainer.async_training.topology import CRITIC_COPY, TRAINER_POOL, counts, generator_pool
from trainer.config.devices import run_devices
from trainer.config.keys import value_at
from trainer.config.schema import Recipe
from trainer.ppo.recipe import PPO, check, extra_roles, inactive_roles
from trainer.ppo.recipe import complete as complete_ppo
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError
from verl_like.placement.pools import expand_roles
from verl_like.registry import load_object

NUMBERS = ("async_training.generators", "async_training.trainers")
TRAINER_ROLES = ("actor", "critic", "ref", "reward_model", "teacher")
PLACEMENTS = {"async": {TRAINER_POOL: TRAINER_ROLES, "generator_0_pool": ["rollout"]}}
"""The only preset. Runs differ in the number of generator pools, so `complete` adds the pools."""


def complete(config: AsyncConfig, keys: Collection[str]) -> tuple[AsyncConfig, Sequence[str]]:
    """Choose pools, roles, devices and correction if the user did not set them."""
    topology = config.async_training.topology
    if topology is not None:
        numbers = dict(zip(NUMBERS, counts(topology), strict=True))
        for key, number in numbers.items():
            if key in keys and value_at(config, key) != number:
                raise ConfigError(
                    f"async_training.topology={topology} sets {key}={number}, but {key}="
                    f"{value_at(config, key)} is set, too. Leave out one of the two keys."
                )
        config = replace_keys(config, numbers)
    config = replace_keys(config, {GENERATOR_SETTINGS: _numbered_settings(config)})
    pool_of = {
        role: generator_pool(generator) for role, (_, generator) in config.generator_roles.items()
    }

    mapping, mapped = dict(config.role_mapping), expand_roles(config.role_mapping)
    for role, pool in {**dict.fromkeys(TRAINER_ROLES, TRAINER_POOL), **pool_of}.items():
        if role not in mapped:
            mapping[role] = pool

    spec, used = dict(config.resource_pool_spec), set(mapping.values())
    if TRAINER_POOL in used:
        spec.setdefault(TRAINER_POOL, [config.async_training.trainers])
    for pool in pool_of.values():
        if pool in used:
            spec.setdefault(pool, [1])
    changes: dict[str, Any] = {
        "role_mapping": mapping,
        "role_workers": config.role_workers | _workers(config),
        "resource_pool_spec": spec,
    }
    if "trainer.n_gpus_per_node" not in keys and config.trainer.simulate is None:
        changes["trainer.n_gpus_per_node"] = sum(max(sizes) for sizes in spec.values() if sizes)
    return complete_ppo(replace_keys(config, changes), keys, _other_weights(config))


def _numbered_settings(config: AsyncConfig) -> dict[Any, GeneratorSettings]:
    """Return the settings with integer keys and chosen engines.

    A command's `.1` and YAML's `1` mean the same.
    """
    settings = config.async_training.generator_settings
    for generator in settings:
        if not str(generator).isdecimal() or (
            str(generator) in settings and generator != str(generator)
        ):
            raise ConfigError(
                f"{GENERATOR_SETTINGS} has the key {generator!r}. Use generators' numbers, up to "
                f"{config.async_training.generators - 1}, each at most once."
            )
    from workers.rollout.build_engine import resolve_engine  # slow import: loads torch

    device_type = run_devices(config.trainer).type
    numbered = {int(generator): changes for generator, changes in settings.items()}
    for generator, changes in numbered.items():
        if changes.name is not None:
            engine = resolve_engine(changes.name, device_type)
            numbered[generator] = replace_keys(changes, {"name": engine})
    return numbered


def _workers(config: AsyncConfig) -> dict[str, str]:
    """Return worker classes for the generators' roles for which the user chose none."""
    classes = {"rollout": ROLLOUT_WORKER, **config.score_roles}
    return {
        role: config.role_workers.get(kind) or classes[kind]
        for role, (kind, generator) in config.generator_roles.items()
        if (generator or kind == CRITIC_COPY) and role not in config.role_workers
    }


def _other_weights(config: AsyncConfig) -> str:
    """Return why samples may come from other weights than the trainer's; "" if they cannot."""
    async_training = config.async_training
    if async_training.max_staleness:
        staleness = f"async_training.max_staleness={async_training.max_staleness}"
        return f"{staleness} allows samples of older weights"
    for generator, settings in async_training.generator_settings.items():
        if settings.quantization:
            rounds = f"quantization={settings.quantization} rounds that generator's weights"
            return f"{GENERATOR_SETTINGS}.{generator}.{rounds}"
    return ""


def check_async(config: AsyncConfig) -> list[str]:
    """Run the checks across the keys of an asynchronous run, and return notices."""
    from trainer.async_training.checks import check_run  # slow import: loads torch

    notices = check_run(config)
    if config.trainer.cls != ASYNC_TRAINER:
        base = load_object(ASYNC_TRAINER, "trainer.cls")
        cls = load_object(config.trainer.cls, "trainer.cls")
        if isinstance(cls, type) and not issubclass(cls, base):
            raise ConfigError(
                f"trainer.cls={config.trainer.cls} is not a subclass of {ASYNC_TRAINER}, so this "
                "run would have no generators. Derive the class from it, or use `verl-like ppo`, "
                "which runs any trainer of PPO."
            )
    return notices


ASYNC = Recipe(
    name="async",
    schema=AsyncConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="async_trainer",
    placements=PLACEMENTS,
    inactive_roles=inactive_roles,
    extra_roles=extra_roles,
    complete=complete,
    translate=PPO.translate,
    registries=("trainer.async_training.samplers", *PPO.registries),
    checks=(check, check_async),
    shares_presets_of=PPO.config_dir,
)
