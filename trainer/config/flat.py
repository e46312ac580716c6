"""Convert a configuration to dotted keys with values, to a hash, and to YAML."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainer.config.schema import RunConfig
from verl_like.masking import masked

MAYBE_A_NUMBER = tuple("+-.0123456789")
"""First characters of texts that OmegaConf, which accepts more than PyYAML, may read as numbers."""
MOST_VALUES = 100_000
"""Number of values that a YAML text with aliases may have."""
YES_AND_NO = ("y", "Y", "n", "N")
"""Texts that other readers parse as true and false."""
NAMES_OF_A_RUN = frozenset(
    {"trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir"}
)


def flat_config(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as dotted key -> value, in JSON's types."""
    return flatten(masked(json.loads(json.dumps(dataclasses.asdict(config), default=str))))


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as dotted key -> value; `prefix` is a section's name and a dot."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def config_hash(config: RunConfig) -> str:
    """Return the hash of a configuration's values.

    The run's name, project and folder do not count. The hash has twelve hexadecimal digits;
    `config.yaml` of the run folder begins with it.
    """
    flat = flat_config(config)
    counted = {key: value for key, value in flat.items() if key not in NAMES_OF_A_RUN}
    text = json.dumps([type(config).__name__, counted], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def checked_yaml(text: str) -> str:
    """Return a YAML text from someone else; raise ValueError if it is invalid or expands too far.

    A few lines of aliases to aliases are billions of values for a program that visits them.
    """
    sizes: dict[int, float] = {}

    def size(node: Any) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # until it is known: a node that contains itself has no end
            pairs = isinstance(node, yaml.MappingNode)
            below = [inner for pair in node.value for inner in pair] if pairs else node.value
            is_scalar = isinstance(node, yaml.ScalarNode)
            sizes[id(node)] = 1 + (0 if is_scalar else sum(map(size, below)))
        return sizes[id(node)]

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        num_values = 0 if root is None else size(root)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if num_values > max(MOST_VALUES, len(sizes)):
        raise ValueError(f"its aliases expand to {num_values:,.0f} values (limit: {MOST_VALUES:,})")
    return text


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """A dumper that quotes texts which could be read as numbers."""


def _text(dumper: Any, text: str) -> Any:
    style = "'" if text.startswith(MAYBE_A_NUMBER) or text in YES_AND_NO else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def in_yaml(values: Mapping[str, Any]) -> str:
    """Return dicts, lists, numbers, texts, true, false and null as YAML, one key per line.

    OmegaConf reads it back unchanged; its own `to_yaml` takes twenty times as long.
    """
    written: str = yaml.dump(
        values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return written
