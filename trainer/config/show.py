"""The YAML that `--cfg` prints: the composed configuration, with the rules of each key."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.compose import as_object, compose_tree
from trainer.config.key_errors import unresolved_value
from trainer.config.keys import Key, field_docs, keys_by_name, leaf_keys, named_keys
from trainer.config.schema import Recipe, RunConfig
from trainer.config.settings import keys_of
from trainer.config.settle import settle
from trainer.config.unused_keys import unused_reason
from verl_like.errors import ConfigError


def composed_yaml(
    settings: Sequence[Override], recipe: Recipe[Any], resolve: bool, all_keys: bool
) -> str:
    """Return the YAML of these settings, without the keys that the run does not read by default."""
    tree = compose_tree(settings, recipe)
    recipe.load_registries()  # the comments list the registered names
    left_out = set() if all_keys else left_out_of(tree, keys_of(settings), recipe)
    try:
        return annotated_yaml(tree, recipe.schema, resolve, left_out, all_keys)
    except OmegaConfBaseException as err:  # a reference that fails, with --resolve
        raise ConfigError(unresolved_value(err, recipe)) from err


def left_out_of(tree: DictConfig, keys: Sequence[str], recipe: Recipe[Any]) -> set[str]:
    """Return the keys of a composed tree that its run does not read; none if this is unknown.

    Conditions may import the user's losses and estimators.
    """
    with redirect_stdout(sys.stderr):  # keeps what user code prints out of stdout
        try:
            config, _ = settle(recipe, as_object(tree, recipe), keys)
            return keys_left_out(config)
        except Exception:  # noqa: BLE001 - user code may raise anything, which the run reports
            return set()


def keys_left_out(config: RunConfig) -> set[str]:
    """Return the keys that this run does not read, which `--cfg job` leaves out."""
    names = [key.name for key in leaf_keys(type(config))]
    return {name for name in names if unused_reason(config, name) is not None}


def without_keys(
    tree: Mapping[Any, Any], left_out: Collection[str], prefix: str = ""
) -> dict[Any, Any]:
    """Return the tree without these keys and without the sections that become empty.

    `prefix` is the place of `tree` in the whole tree: "", or a section's name and a dot.
    """
    result = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in left_out:
            continue
        if not any(dotted.startswith(f"{key}.") for dotted in left_out):
            result[name] = value
        elif below := without_keys(value, left_out, f"{key}."):
            result[name] = below
    return result


INDENT, WIDTH = "  ", 100
FIRST = ("data", "model", "actor_rollout_ref", "critic", "reward", "algorithm", "trainer")


def annotated_yaml(
    composed: DictConfig,
    schema: type,
    resolve: bool = False,
    left_out: Collection[str] = (),
    meanings: bool = False,
) -> str:
    """Return the tree, `FIRST` sections first, with the rules of each field as a comment.

    A comment that is too long for its line is above it. `left_out` keys are only counted at the
    end. With `meanings`, the lines above a key begin with its meaning, and the keys of a section
    that are not set are comments.
    """
    keys = named_keys(schema) if meanings else keys_by_name(schema)
    tree = OmegaConf.to_container(composed, resolve=resolve, enum_to_str=True)
    assert isinstance(tree, dict), "the root of a configuration is a mapping"
    tree = {name: tree[name] for name in (*FIRST, *tree) if name in tree}
    docs = dict(field_docs(schema)) if meanings else {}
    if meanings:
        for key in leaf_keys(schema):
            if key.rules.options is not None:
                docs |= field_docs(key.rules.options, f"{key.name}.")
    lines = [*_lines(without_keys(tree, left_out), "", keys, docs)]
    if left_out:
        lines.append(f"# {len(left_out)} more keys have no effect in this run; see --cfg all")
    return "\n".join(lines) + "\n"


def _lines(
    section: dict[Any, Any], prefix: str, keys: Mapping[str, Key], docs: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of the keys below a section, each indented by its depth."""
    indent = INDENT * prefix.count(".")
    for name, value in section.items():
        key = keys.get(f"{prefix}{name}")
        rules = "" if key is None else key.describe_rules
        options = key.rules.options if docs and key is not None else None
        has_keys = key is not None and (key.is_section or options is not None)
        is_section = has_keys and isinstance(value, dict)
        entry = (
            [f"{name}:"] if is_section and value else OmegaConf.to_yaml({name: value}).splitlines()
        )
        first, *rest = [f"{indent}{line}" for line in entry]
        with_rules = f"{first}  # {rules}" if rules else first
        # a block value allows no comment on its first line
        is_above = bool(rules) and (bool(rest) or len(with_rules) > WIDTH)

        for text in (docs.get(f"{prefix}{name}", ""), rules if is_above else ""):
            width = WIDTH - len(indent) - len("# ")
            words = " ".join(text.split())
            lines = wrap(words, width, break_long_words=False, break_on_hyphens=False)
            yield from (f"{indent}# {line}" for line in lines)
        yield from (first if is_above else with_rules, *rest)
        if is_section:
            below = f"{prefix}{name}."
            yield from _lines(value, below, keys, docs)
            defaults = asdict(options()) if options else {}
            unset = {name: default for name, default in defaults.items() if name not in value}
            for line in _lines(unset, below, keys, docs):
                is_comment = line.lstrip().startswith("#")
                yield line if is_comment else f"{indent}{INDENT}# {line.strip()}"
