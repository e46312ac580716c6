"""The user's own YAML (`--config-dir`), looked through before Hydra composes it.

Hydra stops at the first key that it does not know. Here all of them are found: those of the file
that `--config-name` names, of the presets chosen from that folder, and of what their `defaults`
name there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from verl_like.errors import ConfigError

PACKAGE = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class OwnFiles:
    """A folder of the user's, and the file there that a run begins with."""

    folder: Path
    main: str | None = None

    def presets(self, group: str) -> list[str]:
        """The names of its presets of a group."""
        return [path.stem for path in sorted((self.folder / group).glob("*.yaml"))]

    def names(self) -> list[str]:
        """All its files, as `--config-name` and `defaults` call them."""
        files = self.folder.rglob("*.yaml")
        return [str(path.relative_to(self.folder).with_suffix("")) for path in files]

    def keys(self, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
        """(file, dotted key) of all that the chosen files set; lists of values are not entered."""
        chosen = [self.main or ""]
        for override in overrides:
            group, _, name = override.lstrip("+").partition("=")
            chosen.append(f"{group}/{name}")
        seen: set[str] = set()
        while chosen:
            name = chosen.pop(0).removesuffix(".yaml")
            path = self.folder / f"{name}.yaml"
            if name in seen or not path.is_file():
                continue
            seen.add(name)
            tree, package = _read(path, name)
            chosen += _defaults_of(tree, str(Path(name).parent))
            yield from ((name, key) for key in _keys(tree, package))


def _read(path: Path, name: str) -> tuple[dict[str, Any], str]:
    """The tree of a file, and the section that it belongs to."""
    text = path.read_text(encoding="utf-8")
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not readable as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is a {type(tree).__name__}; a configuration has `key: value`.")
    said = PACKAGE.search(text)
    package = said[1] if said else str(Path(name).parent).replace("/", ".")
    return tree, "" if package in (".", "_global_") else package


def _defaults_of(tree: Mapping[str, Any], group: str) -> list[str]:
    """The files that a list of `defaults` may mean."""
    found = []
    for entry in tree.get("defaults") or ():
        if isinstance(entry, dict):
            found += [f"{str(key).split()[-1]}/{name}" for key, name in entry.items()]
        else:
            found += [str(entry), f"{group}/{entry}"]
    return [name.lstrip("./").partition("@")[0] for name in found]


def _keys(tree: Mapping[str, Any], package: str) -> Iterator[str]:
    for name, value in tree.items():
        key = f"{package}.{name}" if package else str(name)
        if key in ("defaults", "hydra") or name == "defaults":
            continue
        if isinstance(value, dict) and value:
            yield from _keys(value, key)
        else:
            yield key
