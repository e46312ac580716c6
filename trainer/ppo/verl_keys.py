"""Translate overrides with verl's keys into this project's keys: `PPO.translate`.

    translate(map(parse, ["trainer.balance_batch=True", "trainer.max_actor_ckpt_to_keep=2"]))
    # trainer.max_ckpt_to_keep=2, and one notice about both

A key without a counterpart is dropped with a notice if it has no effect here or only determines how
the work is laid out. Other keys without a counterpart are rejected in one error. Keys that neither
verl nor this project has are left to the key check that runs next. `verl_keys.yaml` lists verl's
keys that differ from ours; `trainer.tools.migrate.verl` and the docs read it, too.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.types import Override

from trainer.config.keys import checked_yaml, config_keys
from trainer.config.settings import as_text, keys_in, parse
from trainer.ppo.config import PPOConfig
from verl_like.errors import ConfigError, nearest

ENGINES = ("dp", "fsdp2", "fsdp_turbo", "megatron", "mindspeed", "veomni")
"""verl's engines; FSDP and `parallel` shard their models here."""
SHARDED = dict.fromkeys(ENGINES, "fsdp")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
SAME_VALUES: Mapping[str, Mapping[str, str]] = {
    "actor_rollout_ref.actor.strategy": SHARDED,
    "actor_rollout_ref.model.compute_dtype": DTYPES,
    "actor_rollout_ref.model.dtype": DTYPES,
    "actor_rollout_ref.rollout.name": {"sglang": "vllm", "trtllm": "vllm"},
    "critic.strategy": SHARDED,
    "trainer.device": {"npu": "auto"},
    "trainer.save_freq": {"False": "-1"},
    "trainer.test_freq": {"False": "-1"},
}
"""Maps key -> verl's name of a value -> this project's name."""
TRACKERS = ("console", "tensorboard", "trackio", "wandb")
BASES = ("ppo_trainer", "ppo_megatron_trainer", "_self_")
DRIVER_CONFIGS = ("dapo_trainer", "dapo_megatron_trainer", "one_step_off_*", "fully_async_ppo_*")
"""Names of the configurations that verl's own drivers ship, which have verl's defaults."""
GLOBAL_KEYS = ("*.micro_batch_size", "*.log_prob_micro_batch_size", "*.ppo_micro_batch_size")
"""Older keys, which count the rows on all ranks together."""
SEQUENCE_SIZES = (
    "fsdp_config.ulysses_sequence_parallel_size",
    "ulysses_sequence_parallel_size",
    "megatron.context_parallel_size",
    "veomni.ulysses_parallel_size",
)
"""Keys of a role, one for each engine, for the ranks that share the tokens of a row."""
MODEL_SIZES = ("megatron.tensor_model_parallel_size", "megatron.pipeline_model_parallel_size")
"""Keys of a role for the ranks that compute the same tokens."""
WARM_UPS = ("actor_rollout_ref.actor.optim", "critic.optim")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tables:
    """verl's keys that differ from ours; names may contain `*`."""

    renamed: Mapping[str, str]
    """Maps names in several versions of verl to ours; other names are declared at the fields,
    `config_field(verl=...)`."""
    changes_nothing: Mapping[str, str]
    """Maps keys that have no effect, whatever their value, to what this project does."""
    changes_nothing_at: Mapping[str, Mapping[str, Any]]
    """Maps keys that have no effect at some values to these values, `at`, and to the way out for
    other values, `else`."""
    not_here: Mapping[str, str]
    """Maps keys that have no counterpart to the way out."""
    newer: Mapping[str, str]
    """Maps names in other versions, or their prefixes, to the names in these tables."""
    lays_out: Sequence[str]
    """Unsupported keys that determine how the work is laid out, not what is trained."""


@cache
def tables() -> Tables:
    """Return the content of `verl_keys.yaml`."""
    tree = yaml.safe_load(Path(__file__).with_name("verl_keys.yaml").read_text(encoding="utf-8"))
    known, _, _ = _ours()
    for name, ours in tree.pop("renamed_per_role").items():
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
            key = f"{role}.{ours}".replace("critic.fsdp_config", "critic.model.fsdp_config")
            if key in known:
                tree["renamed"][f"{role}.{name}"] = key
    for name in ("changes_nothing", "not_here"):  # in the file: reason -> keys
        tree[name] = {key: reason for reason, keys in tree[name].items() for key in keys}
    return Tables(**tree)


@dataclass(frozen=True)
class KeyTranslation:
    """The translation of one of verl's keys."""

    key: str = ""
    """Our key, if there is one."""
    value: str = ""
    """The value that our key gets."""
    nothing: str = ""
    """This project's behavior, if the key has no effect."""
    rejected: str = ""
    """The way out, if the key has no counterpart."""
    lays_out: bool = False
    """True if the run is the same experiment without this key."""


def translate(settings: Iterable[Override]) -> list[Override]:
    """Return the settings with our keys; a notice lists what was dropped or renamed."""
    translated, notices, rejected = [], [], []
    settings = [part for setting in settings for part in _parts(setting)]
    sizes = ("trainer.n_gpus_per_node", "trainer.nnodes")
    values = {key: str(attrgetter(key)(PPOConfig())) for key in sizes}  # verl's defaults differ
    values |= {
        setting.key_or_group: setting.get_value_string()
        for setting in settings
        if not setting.is_delete()
    }
    for setting in settings:
        key, value = setting.key_or_group, values.get(setting.key_or_group, "")
        outcome = None if setting.is_delete() else translate_key(key, value, values)
        if outcome is None:
            translated.append(setting)
        elif outcome.nothing:
            notices.append(f"{key}: {outcome.nothing}")
        elif outcome.rejected and outcome.lays_out:
            notices.append(f"{key}={value} is left out: {outcome.rejected}")
        elif outcome.rejected:
            rejected.append(f"{key}={value}: {outcome.rejected}")
        else:
            translated.append(parse(f"{outcome.key}={outcome.value}"))
            if outcome.value != value:
                notices.append(f"{key}={value} is {outcome.key}={outcome.value} here")
            elif outcome.key != key:
                notices.append(f"{key} is {outcome.key}")

    notices += _warm_up_by_share(translated)
    if rejected:
        lines = "\n  ".join(rejected)
        raise ConfigError(
            "these settings of verl cannot be translated; change them, because without them the "
            f"training would be another one:\n  {lines}"
        )
    if notices:
        lines = "\n  ".join(sorted(notices))
        logger.warning("note: keys of verl that are ignored or renamed here:\n  %s", lines)
    return translated


def _parts(setting: Override) -> list[Override]:
    """Split `section={key: value}` into its settings, if one of its keys exists only in verl."""
    name, value = setting.key_or_group, setting.value()
    if keys_in(name, value) == [name]:
        return [setting]
    parts = _flat({name: value})
    if all(
        our_key(key) == key or translate_key(key, text, parts) is None
        for key, text in parts.items()
    ):
        return [setting]
    return [parse(f"{key}={text}") for key, text in parts.items()]


def _warm_up_by_share(settings: list[Override]) -> list[str]:
    """Set the warm-up steps to -1 if only their ratio is set, because the ratio then applies."""
    keys = {setting.key_or_group for setting in settings}
    notices = []
    for section in WARM_UPS:
        share, steps = f"{section}.lr_warmup_steps_ratio", f"{section}.lr_warmup_steps"
        if share in keys and steps not in keys:
            settings.append(parse(f"{steps}=-1"))
            notices.append(f"{share} needs lr_warmup_steps=-1")
    return notices


def translate_key(
    key: str, value: str, settings: Mapping[str, str] = MappingProxyType({})
) -> KeyTranslation | None:
    """Translate one of verl's keys; return None for keys unknown to verl.

    A key that has the same name in this project also counts as verl's. `settings` has all keys of
    the command.
    """
    key = older_name_of(key)
    table = tables()
    if key in table.changes_nothing:
        return KeyTranslation(nothing=table.changes_nothing[key])
    ours = our_key(key)
    if ours is not None:
        is_axis = ".parallel." in ours and re.search(r"\.(megatron|veomni)\.", key)
        if is_axis and (why := _no_axis(ours, value, settings)):
            return KeyTranslation(rejected=why, lays_out=True)
        if ours.endswith(".fsdp_config.fsdp_size"):
            value = _shard_size(key, value, settings)
        return KeyTranslation(key=ours, value=SAME_VALUES.get(ours, {}).get(value, value))
    if _first_match(key, GLOBAL_KEYS) and value.isdigit():
        of_a_rank = f"{key}_per_gpu"
        rows = _rows_of_one_rank(int(value), settings)
        return KeyTranslation(key=our_key(of_a_rank) or of_a_rank, value=str(rows))
    lays_out = bool(_first_match(key, table.lays_out))
    if name := _first_match(key, table.changes_nothing):
        return KeyTranslation(nothing=table.changes_nothing[name])
    if name := _first_match(key, table.changes_nothing_at):
        texts = table.changes_nothing_at[name]["at"]
        if _plain(value) in [_value_of(text, settings) for text in texts]:
            return KeyTranslation(nothing=f"{_plain(value)} is the built-in behavior")
        return KeyTranslation(rejected=table.changes_nothing_at[name]["else"], lays_out=lays_out)
    if name := _first_match(key, table.not_here):
        return KeyTranslation(rejected=table.not_here[name], lays_out=lays_out)
    return None


def _value_of(text: str, settings: Mapping[str, str]) -> str:
    """Return the text, or the value of the key if the text is `$key`."""
    if not text.startswith("$"):
        return text
    key = text.removeprefix("$")
    return settings.get(key) or str(attrgetter(key)(PPOConfig()))


def _shard_size(key: str, value: str, settings: Mapping[str, str]) -> str:
    """Return our size for verl's, which counts the ranks that share a sequence, except in VeOmni.

    verl shards over all ranks if the size is larger than their number.
    """
    role = re.sub(r"\.(model\.)?(fsdp_config|veomni)\.fsdp_size$", "", key)
    shared = filter(None, (settings.get(f"{role}.{name}") for name in SEQUENCE_SIZES))
    sequence = next(shared, "1")
    sizes = [settings.get("trainer.n_gpus_per_node", "1"), settings.get("trainer.nnodes", "1")]
    ranks = math.prod(map(int, sizes)) if all(map(str.isdigit, sizes)) else 1
    if not value.isdigit():
        return value
    size, per_rank = int(value), int(sequence) if sequence.isdigit() else 1
    if ".veomni." in key:
        size *= per_rank
    if 1 < ranks < size:  # 1 is the default here, which a script may not mean
        return "-1"
    return str(size // per_rank) if size % per_rank == 0 else value


def _no_axis(key: str, value: str, settings: Mapping[str, str]) -> str:
    """Return why this layout of ranks is not possible; "" if it is."""
    section, _, axis = key.rpartition(".")
    if not value.isdigit():
        return (
            f"{key} needs a number. Set the variable that the script reads: NAME=... verl-like "
            "migrate verl SCRIPT"
        )
    experts = settings.get(f"{section.removesuffix('parallel')}megatron.expert_model_parallel_size")
    if axis == "tp" and value != "1" and experts not in (None, "1"):
        return f"{section}.ep={experts} keeps whole experts on their ranks, but tp would split them"
    return ""


def _rows_of_one_rank(rows: int, settings: Mapping[str, str]) -> int:
    """Return the rows per rank of a micro-batch whose size counts the rows on all ranks."""

    def number(key: str, default: int) -> int:
        return int(value) if (value := settings.get(key, "")).isdigit() else default

    ranks = number("trainer.n_gpus_per_node", 8) * number("trainer.nnodes", 1)
    actor = "actor_rollout_ref.actor"
    shared = math.prod(number(f"{actor}.{key}", 1) for key in MODEL_SIZES)
    shared *= max(number(f"{actor}.{key}", 1) for key in SEQUENCE_SIZES)
    return max(rows // max(ranks // shared, 1), 1)


def settings_of_configuration(name: str, path: str) -> list[str]:
    """Return the settings in the YAML file that `--config-name` and `--config-path` select."""
    file, settings = configuration(name, path, [Path()])
    if file is None:
        logger.warning(
            "note: --config-name %s is a configuration of verl and is not read: keys that you "
            "do not set have the defaults of verl-like. Use `verl-like migrate` for verl's "
            "defaults.",
            name,
        )
    return [f"{key}={value}" for key, value in settings.items()]


def configuration(
    name: str, path: str, folders: Sequence[Path]
) -> tuple[Path | None, dict[str, str]]:
    """Return the file of `--config-name` and its keys; None for verl's own configurations."""
    name = name.removesuffix(".yaml")
    if not name or any(fnmatchcase(name, pattern) for pattern in (*BASES, *DRIVER_CONFIGS)):
        return None, {}
    places = [*([path] if path else []), "config", "."]
    files = [Path(folder, place, f"{name}.yaml") for folder in folders for place in places]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        names = [other.stem for file in files for other in file.parent.glob("*.yaml")]
        raise ConfigError(
            f"--config-name {name}: there is no {files[0]}.{nearest(name, names)} Run this command "
            "in the folder of the script that has this configuration."
        )
    return file, _keys_of(file)


def _keys_of(file: Path) -> dict[str, str]:
    """Return the keys of a YAML file, merged over the files in its `defaults`."""
    try:
        tree = yaml.safe_load(checked_yaml(file.read_text(encoding="utf-8"))) or {}
    except ValueError as err:
        raise ConfigError(f"{file} cannot be read: {err}") from err
    values: dict[str, str] = {}
    for base in tree.pop("defaults", []):
        if base not in BASES:
            path = file.with_name(f"{base}.yaml")
            if not isinstance(base, str) or path == file or not path.is_file():
                raise ConfigError(f"{file} includes {base}, which is not a YAML file next to it.")
            values |= _keys_of(path)
    tree.pop("hydra", None)
    return values | _flat(tree)


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, str]:
    values: dict[str, str] = {}
    for name, value in tree.items():
        is_section = isinstance(value, Mapping) and value
        key = older_name_of(f"{above}{name}")
        values |= _flat(value, f"{above}{name}.") if is_section else {key: as_text(value, key)}
    return values


def older_name_of(key: str) -> str:
    """Return the table's name for a key of rewards, whose name differs between versions of verl."""
    start = next((name for name in tables().newer if f"{key}.".startswith(f"{name}.")), "")
    return tables().newer[start] + key.removeprefix(start) if start else key


def with_trackers(value: str) -> tuple[list[str], list[str]]:
    """Split trackers into those that are supported here and the others."""
    listed = parse(f"x={value}").value()
    names = [str(name) for name in (listed if isinstance(listed, list) else [listed])]
    here = [name for name in names if name in TRACKERS]
    return here, [name for name in names if name not in here]


def our_key(key: str) -> str | None:
    """Return our key for verl's, by equal names, a field's `verl=` or the table; otherwise None."""
    known, takes_any, names = _ours()
    if key in known or key.startswith(takes_any):
        return key
    for name, ours in {**names, **tables().renamed}.items():
        ours += key.removeprefix(name)
        if f"{key}.".startswith(f"{name}.") and (ours in known or ours.startswith(takes_any)):
            return ours
    return None


@cache
def _ours() -> tuple[Collection[str], tuple[str, ...], Mapping[str, str]]:
    """Return our keys, the prefixes of user-defined keys, and verl's names mapped to our keys."""
    keys = config_keys(PPOConfig)
    options = {key.name: key.rules.options for key in keys if key.rules.options is not None}
    takes_any = tuple(f"{key.name}." for key in keys if key.takes_any and key.name not in options)
    names = {key.rules.verl: key.name for key in keys if key.rules.verl}
    known = {key.name for key in keys}
    for section, schema in options.items():
        known |= {f"{section}.{key.name}" for key in config_keys(schema)}
    return known, takes_any, names


def _first_match(key: str, patterns: Iterable[str]) -> str:
    """Return the first pattern that the key matches, or ""."""
    return next((pattern for pattern in patterns if fnmatchcase(key, pattern)), "")


def _plain(value: str) -> str:
    """Return the value in lower case, without quotes and blanks."""
    plain = re.sub(r"[\s'\"]", "", value).lower()
    return "null" if plain in ("none", "") else plain
