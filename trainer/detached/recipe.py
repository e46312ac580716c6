"""usage: verl-like detached data.train_files=FILE
           actor_rollout_ref.model.path=FOLDER [key=value ...]

PPO whose samples are made beside the training: makers generate on pools of their own, the trainer
takes batches from a buffer and sends its weights back. All keys of `verl-like ppo`, and:

  detached.makers=2  detached.trainers=1   or detached.topology=2m1t
  detached.max_staleness=1                 versions that a sample may be old; 0 is synchronous
  verl-like detached --cfg all             every key with its meaning
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from trainer.config.recipe import Recipe
from trainer.detached.config import (
    MAKER_SETTINGS,
    OWN_TRAINER,
    ROLLOUT_WORKER,
    DetachedConfig,
    MakerSettings,
)
from trainer.detached.topology import TRAINER_POOL, counts, maker_pool
from trainer.ppo.recipe import PPO, check, extra_roles, inactive_roles
from trainer.ppo.recipe import complete as complete_ppo
from trainer.ppo.sizes import CRITIC_COPY
from verl_like.config_key import changed
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from verl_like.registry import load_object

TRAINER_ROLES = ("actor", "critic", "ref", "reward_model", "teacher")
PLACEMENTS = {"detached": {TRAINER_POOL: TRAINER_ROLES, "maker_0_pool": ["rollout"]}}
"""The roles of a run; its pools are as many as it has makers, so no preset could name them."""


def complete(config: DetachedConfig, keys: Collection[str]) -> tuple[DetachedConfig, Sequence[str]]:
    """Settle pools, roles, devices and correction, where the user did not."""
    if config.detached.topology is not None:
        makers, trainers = counts(config.detached.topology)
        config = changed(config, {"detached.makers": makers, "detached.trainers": trainers})
    config = changed(config, {MAKER_SETTINGS: _numbered_settings(config)})
    pool_of = {role: maker_pool(maker) for role, (_, maker) in config.maker_roles.items()}

    mapping, mapped = dict(config.role_mapping), expand_roles(config.role_mapping)
    for role, pool in {**dict.fromkeys(TRAINER_ROLES, TRAINER_POOL), **pool_of}.items():
        if role not in mapped:
            mapping[role] = pool

    spec, used = dict(config.resource_pool_spec), set(mapping.values())
    if TRAINER_POOL in used:
        spec.setdefault(TRAINER_POOL, [config.detached.trainers])
    for pool in pool_of.values():
        if pool in used:
            spec.setdefault(pool, [1])
    changes: dict[str, Any] = {
        "role_mapping": mapping,
        "role_workers": config.role_workers | _workers(config),
        "resource_pool_spec": spec,
    }
    if "trainer.n_gpus_per_node" not in keys:
        changes["trainer.n_gpus_per_node"] = sum(max(sizes) for sizes in spec.values() if sizes)
    return complete_ppo(changed(config, changes), keys, _other_weights(config))


def _numbered_settings(config: DetachedConfig) -> dict[Any, MakerSettings]:
    """`{1: ...}` of a dict or of YAML, and `.1` of a command, are both of maker 1."""
    settings = config.detached.maker_settings
    for maker in settings:
        if not str(maker).isdecimal() or (str(maker) in settings and maker != str(maker)):
            raise ConfigError(
                f"{MAKER_SETTINGS} has {maker!r}: give each maker's number once, 0 to "
                f"{config.detached.makers - 1}."
            )
    return {int(maker): own for maker, own in settings.items()}


def _workers(config: DetachedConfig) -> dict[str, str]:
    """Return the classes of makers' roles that have none yet."""
    classes = {"rollout": ROLLOUT_WORKER, **config.score_roles}
    return {
        role: config.role_workers.get(kind) or classes[kind]
        for role, (kind, maker) in config.maker_roles.items()
        if (maker or kind == CRITIC_COPY) and role not in config.role_workers
    }


def _other_weights(config: DetachedConfig) -> str:
    """Why samples may be of other weights than the trainer's, by the keys of detached runs."""
    detached = config.detached
    if detached.max_staleness:
        return f"detached.max_staleness={detached.max_staleness} lets samples be of older weights"
    for maker, own in detached.maker_settings.items():
        if own.quantization:
            rounds = f"quantization={own.quantization} rounds that maker's weights"
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
    shares_presets_of=PPO.config_dir,
)
