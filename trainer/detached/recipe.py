"""usage: verl-like detached data.train_files=FILE
           actor_rollout_ref.model.path=FOLDER [key=value ...]

PPO whose samples are made beside the training: makers generate on pools of their own, the trainer
takes batches from a buffer and sends its weights back. All keys of `verl-like ppo`, and:

  detached.makers=2  detached.trainers=1   or detached.topology=2m1t
  detached.max_staleness=1                 versions that a sample may be old; 0 is synchronous
  verl-like detached --cfg all             every key with its meaning
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from trainer.config.recipe import Recipe
from trainer.detached.config import MAKER_SETTINGS, OWN_TRAINER, DetachedConfig, by_number
from trainer.detached.roles import place_makers
from trainer.detached.topology import TRAINER_POOL, counts
from trainer.ppo.recipe import (
    PPO,
    check,
    correct_by_default,
    extra_roles,
    inactive_roles,
    rows_where_asked,
)
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from verl_like.registry import load_object

TRAINER_ROLES = ("actor", "critic", "ref", "reward_model", "teacher")
PLACEMENTS = {"detached": {TRAINER_POOL: TRAINER_ROLES, "maker_0_pool": ["rollout"]}}
"""The roles of a run; its pools are as many as it has makers, so no preset could name them."""


def complete(config: DetachedConfig, keys: Collection[str]) -> list[str]:
    """Pools, roles, devices and correction, where the user has not set them."""
    detached = config.detached
    if detached.topology is not None:
        detached.makers, detached.trainers = counts(detached.topology)
    detached.maker_settings = by_number(detached.maker_settings)
    makers = place_makers(config, config.topology)

    mapped = expand_roles(config.role_mapping)
    wanted = {role: TRAINER_POOL for role in TRAINER_ROLES} | makers
    for role, pool in wanted.items():
        if role not in mapped:
            config.role_mapping[role] = pool

    used = set(config.role_mapping.values())
    if TRAINER_POOL in used:
        config.resource_pool_spec.setdefault(TRAINER_POOL, [detached.trainers])
    for pool in makers.values():
        if pool in used:
            config.resource_pool_spec.setdefault(pool, [1])
    if "trainer.n_gpus_per_node" not in keys:
        sizes = [max(sizes) for sizes in config.resource_pool_spec.values() if sizes]
        config.trainer.n_gpus_per_node = sum(sizes)
    notices = correct_by_default(config, keys, _other_weights(config))
    return [*rows_where_asked(config, keys), *notices]


def _other_weights(config: DetachedConfig) -> str:
    """Why samples may be of other weights than the trainer's, by the keys of detached runs."""
    detached = config.detached
    if detached.max_staleness:
        return f"detached.max_staleness={detached.max_staleness} lets samples be of older weights"
    for maker, settings in detached.maker_settings.items():
        if isinstance(settings, Mapping) and settings.get("quantization"):
            rounds = f"quantization={settings['quantization']} rounds that maker's weights"
            return f"{MAKER_SETTINGS}.{maker}.{rounds}"
    return ""


def check_detached(config: DetachedConfig) -> None:
    """The rules between fields of a detached run."""
    from trainer.detached.checks import check_run

    check_run(config)
    if config.trainer.cls != OWN_TRAINER:
        _check_trainer(config.trainer.cls)


def _check_trainer(path: str) -> None:
    """Refuse a trainer of the user's that would leave makers out."""
    own = load_object(OWN_TRAINER, "trainer.cls")
    cls = load_object(path, "trainer.cls")
    if isinstance(cls, type) and not issubclass(cls, own):
        raise ConfigError(
            f"trainer.cls={path} is no subclass of {OWN_TRAINER}, without which a detached run has "
            "no makers. `verl-like ppo` runs any trainer of PPO."
        )


DETACHED = Recipe(
    name="detached",
    schema=DetachedConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="detached_trainer",
    placements=PLACEMENTS,
    inactive_roles=inactive_roles,
    extra_roles=extra_roles,
    complete=complete,
    translate=PPO.translate,
    registries=("trainer.detached.samplers", *PPO.registries),
    checks=(check, check_detached),
    only_noticed=PPO.only_noticed,
    shares_presets_of=PPO.config_dir,
)
