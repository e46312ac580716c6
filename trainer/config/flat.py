"""A configuration as dotted keys with values, as one number for all of them, and as YAML."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainer.config.schema import RunConfig
from verl_like.errors import ConfigError
from verl_like.masking import masked

MAYBE_A_NUMBER = tuple("+-.0123456789")
"""How texts begin that OmegaConf could take for numbers: it knows more of them than PyYAML."""
YES_AND_NO = ("y", "Y", "n", "N")
"""Which other readers take for true and false."""
NAMES_OF_A_RUN = frozenset(
    {"trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir"}
)


MOST_VALUES = 100_000
"""Of a YAML file with its aliases written out: a file of ten lines can stand for billions."""


def refuse_many_aliases(file: Path) -> None:
    """Refuse YAML whose aliases make more than `MOST_VALUES` of its values, or have no end."""
    text = file.read_text(encoding="utf-8")
    if "*" not in text:
        return
    sizes: dict[int, float] = {}

    def size(node: Any) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # for one that holds itself
            inner = node.value if isinstance(node, yaml.CollectionNode) else ()
            pairs = (each if isinstance(each, tuple) else (each,) for each in inner)
            sizes[id(node)] = 1 + sum(size(each) for pair in pairs for each in pair)
        return sizes[id(node)]

    try:
        many = size(yaml.compose(text, Loader=yaml.SafeLoader)) > MOST_VALUES
    except yaml.YAMLError:
        return  # who reads it says what is wrong
    except RecursionError:
        many = True
    if many:
        raise ConfigError(
            f"{file}: its aliases (*name) stand for more than {MOST_VALUES:,} values. Write out "
            "what is needed."
        )


def flat_config(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> value of a configuration, as JSON has it."""
    return flatten(masked(json.loads(json.dumps(dataclasses.asdict(config), default=str))))


def flatten(tree: Any) -> dict[str, Any]:
    """Dotted key -> value of dicts within dicts."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else str(name), inner)
        else:
            flat[prefix] = value

    walk("", tree)
    return flat


def config_hash(config: RunConfig) -> str:
    """A number that configurations of equal values share, whatever they were made from.

    What the run is called and where its folder is do not count. Twelve hexadecimal digits;
    `config.yaml` of the run folder begins with them.
    """
    flat = flat_config(config)
    counted = {key: value for key, value in flat.items() if key not in NAMES_OF_A_RUN}
    text = json.dumps([type(config).__name__, counted], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes texts that could be read as numbers."""


def _text(dumper: Any, text: str) -> Any:
    style = "'" if text.startswith(MAYBE_A_NUMBER) or text in YES_AND_NO else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def in_yaml(values: Mapping[str, Any]) -> str:
    """Dicts, lists, numbers, texts, true, false and null, in their order, a key a line.

    OmegaConf reads them back as they were; its own `to_yaml` takes twenty times as long.
    """
    written: str = yaml.dump(
        values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return written
