"""A composed configuration as YAML, each key with its rules, for `--cfg job` and `--cfg all`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.config.keys import Key, config_keys, field_docs
from trainer.config.unused_keys import without_keys

INDENT = "  "


def annotated_yaml(
    composed: DictConfig,
    schema: type,
    resolve: bool = False,
    left_out: Collection[str] = (),
    meanings: bool = False,
) -> str:
    """Return the tree in the order of its composition, with the rules of each field as a comment.

    `left_out` keys are only counted at the end. With `meanings`, the line above a key has its
    meaning.
    """
    keys = {key.name: key for key in config_keys(schema)}
    tree = OmegaConf.to_container(composed, resolve=resolve, enum_to_str=True)
    assert isinstance(tree, dict), "the root of a configuration is a mapping"
    docs = field_docs(schema) if meanings else {}
    lines = [*_lines(without_keys(tree, left_out), "", keys, docs)]
    if left_out:
        lines.append(f"# {len(left_out)} more keys, which nothing reads in this run: --cfg all")
    return "\n".join(lines) + "\n"


def _lines(
    section: dict[Any, Any], prefix: str, keys: dict[str, Key], docs: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of the keys below a section, each indented by its depth."""
    indent = INDENT * prefix.count(".")
    for name, value in section.items():
        key = keys.get(f"{prefix}{name}")
        comment = f"  # {key.rules_in_words}" if key is not None and key.rules_in_words else ""

        if meaning := docs.get(f"{prefix}{name}"):
            yield f"{indent}# {' '.join(meaning.split())}"
        if key is not None and key.is_section and isinstance(value, dict):
            yield f"{indent}{name}:{comment}"
            yield from _lines(value, f"{key.name}.", keys, docs)
            continue

        first, *rest = OmegaConf.to_yaml({name: value}).splitlines()
        if rest and comment:  # a block value allows no comment on its first line
            yield f"{indent}{comment.strip()}"
            comment = ""
        yield f"{indent}{first}{comment}"
        yield from (f"{indent}{line}" for line in rest)
