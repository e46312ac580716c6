"""Overrides with verl's keys, written in ours: `PPO.translate`.

    translate(map(parse, ["trainer.balance_batch=True", "trainer.max_actor_ckpt_to_keep=2"]))
    # trainer.max_ckpt_to_keep=2, and one notice about both

What has no counterpart is refused, all of it at once. A key that neither verl nor we have stays as
it is: the check of keys comes next. `verl_keys.yaml` has the keys of verl's that are none of ours,
for scripts of verl's (`trainer.migrate.verl`) and the docs, too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.types import Override

from trainer.config.keys import config_keys
from trainer.config.settings import parse
from trainer.ppo.config import PPOConfig
from verl_like.errors import ConfigError

SHARDED = dict.fromkeys(("fsdp2", "megatron", "mindspeed", "veomni"), "fsdp")
NEVER = {"0": "-1", "False": "-1"}
SAME_VALUES: Mapping[str, Mapping[str, str]] = {
    "actor_rollout_ref.actor.strategy": SHARDED,
    "actor_rollout_ref.rollout.name": {"sglang": "vllm", "trtllm": "vllm"},
    "critic.strategy": SHARDED,
    "trainer.device": {"npu": "auto"},
    "trainer.save_freq": NEVER,
    "trainer.test_freq": {"False": "-1"},
}
"""Key -> verl's word for a value -> ours."""
TRACKERS = ("console", "tensorboard", "wandb")
WARM_UPS = ("actor_rollout_ref.actor.optim", "critic.optim")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tables:
    """Keys of verl's that are none of ours; names may hold `*`."""

    renamed: Mapping[str, str]
    """Names of several versions -> ours; further ones stand at the fields, `key(verl=...)`."""
    changes_nothing: Mapping[str, str]
    """Keys that change nothing, whatever their value -> what is the case instead."""
    changes_nothing_at: Mapping[str, Mapping[str, Any]]
    """Keys that change nothing `at` some values -> the way out, `else`."""
    not_here: Mapping[str, str]
    """Keys that have no counterpart -> the way out."""
    newer: Mapping[str, str]
    """Later names, or beginnings of them -> the names that these tables have."""
    lays_out: Sequence[str]
    """Those of the refused keys that say how the work is laid out, not what is trained."""


@cache
def tables() -> Tables:
    """What stands in `verl_keys.yaml`."""
    tree = yaml.safe_load(Path(__file__).with_name("verl_keys.yaml").read_text(encoding="utf-8"))
    for name in ("changes_nothing", "not_here"):  # there a reason stands once for all its keys
        tree[name] = {key: reason for reason, keys in tree[name].items() for key in keys}
    return Tables(**tree)


@dataclass(frozen=True)
class Fate:
    """What becomes of one of verl's keys here."""

    key: str = ""
    """Ours, where there is one."""
    nothing: str = ""
    """What is the case here, where the key changes nothing."""
    refused: str = ""
    """The way out, where the key has no counterpart."""
    lays_out: bool = False
    """Whether the run is the same experiment without a key that is refused."""


def translate(settings: Iterable[Override]) -> list[Override]:
    """The settings in our keys; a notice says what was left out or renamed."""
    kept, notices, refused = [], [], []
    settings = list(settings)
    given = {
        each.key_or_group: each.get_value_string() for each in settings if not each.is_delete()
    }
    for setting in settings:
        key, value = setting.key_or_group, given.get(setting.key_or_group, "")
        fate = None if setting.is_delete() else fate_of(key, value)
        if fate is None:
            kept.append(setting)
        elif fate.refused:
            refused.append(f"{key}={value}: {fate.refused}")
        elif fate.nothing:
            notices.append(f"{key}: {fate.nothing}")
        else:
            ours = SAME_VALUES.get(fate.key, {}).get(value, value)
            kept.append(parse(f"{fate.key}={ours}"))
            if fate.key != key:
                notices.append(f"{key} is {fate.key}")
            elif ours != value:
                notices.append(f"{key}={value} is {ours} here")

    notices += _warm_up_by_share(kept)
    if refused:
        lines = "\n  ".join(refused)
        raise ConfigError(f"verl has these keys, and there is nothing like them here:\n  {lines}")
    if notices:
        lines = "\n  ".join(sorted(notices))
        logger.warning("notice: keys of verl's that change nothing, or are called:\n  %s", lines)
    return kept


def _warm_up_by_share(settings: list[Override]) -> list[str]:
    """In verl a warm-up's share counts where no number of steps is given; here -1 steps say so."""
    given = {setting.key_or_group for setting in settings}
    notices = []
    for section in WARM_UPS:
        share, steps = f"{section}.lr_warmup_steps_ratio", f"{section}.lr_warmup_steps"
        if share in given and steps not in given:
            settings.append(parse(f"{steps}=-1"))
            notices.append(f"{share} comes with lr_warmup_steps=-1")
    return notices


def fate_of(key: str, value: str) -> Fate | None:
    """What becomes of a key of verl's at that value; None of what verl does not have.

    Ours are verl's, too, by the same name.
    """
    ours = renamed(key)
    if ours is not None:
        return Fate(key=ours)
    table = tables()
    lays_out = bool(_found(key, table.lays_out))
    if name := _found(key, table.changes_nothing):
        return Fate(nothing=table.changes_nothing[name])
    if name := _found(key, table.changes_nothing_at):
        if _plain(value) in table.changes_nothing_at[name]["at"]:
            return Fate(nothing=f"{_plain(value)} is how it is here")
        return Fate(refused=table.changes_nothing_at[name]["else"], lays_out=lays_out)
    if name := _found(key, table.not_here):
        return Fate(refused=table.not_here[name], lays_out=lays_out)
    return None


def older(key: str) -> str:
    """The name that verl had for a key of rewards before it had a section of them."""
    start = next((name for name in tables().newer if f"{key}.".startswith(f"{name}.")), "")
    return tables().newer[start] + key.removeprefix(start) if start else key


def with_trackers(value: str) -> tuple[list[str], list[str]]:
    """The trackers that are here, and the others."""
    listed = parse(f"x={value}").value()
    names = [str(name) for name in (listed if isinstance(listed, list) else [listed])]
    here = [name for name in names if name in TRACKERS]
    return here, [name for name in names if name not in here]


def renamed(key: str) -> str | None:
    """Our key: of the same name, by a field's `verl=`, or by the names of its older versions."""
    known, takes_any, names = _ours()
    if key in known or key.startswith(takes_any):
        return key
    names = {**names, **tables().renamed}
    if key in names:
        return names[key]
    for name, ours in names.items():
        if key.startswith(f"{name}.") and f"{ours}." in takes_any:
            return ours + key.removeprefix(name)
    return None


@cache
def _ours() -> tuple[Collection[str], tuple[str, ...], Mapping[str, str]]:
    """Our keys; the beginnings of the user's own keys; verl's names at the fields -> ours."""
    keys = config_keys(PPOConfig)
    takes_any = tuple(f"{key.name}." for key in keys if key.takes_any)
    names = {key.rules.verl: key.name for key in keys if key.rules.verl}
    return {key.name for key in keys}, takes_any, names


def _found(key: str, patterns: Iterable[str]) -> str:
    """The first pattern that the key fits; "" where there is none."""
    return next((pattern for pattern in patterns if fnmatchcase(key, pattern)), "")


def _plain(value: str) -> str:
    """A value without quotes and blanks, its words in small letters."""
    plain = re.sub(r"[\s'\"]", "", value).lower()
    return "null" if plain in ("none", "") else plain
