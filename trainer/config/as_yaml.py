"""Plain values as YAML that OmegaConf reads back as they were: a run's `config.yaml`.

`OmegaConf.to_yaml` makes a tree of nodes first, and takes twenty times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

MAYBE_A_NUMBER = tuple("+-.0123456789")
"""How texts begin that OmegaConf could take for numbers: it knows more of them than PyYAML."""
YES_AND_NO = ("y", "Y", "n", "N")
"""Which other readers take for true and false."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes texts that could be read as numbers."""


def _text(dumper: Any, text: str) -> Any:
    style = "'" if text.startswith(MAYBE_A_NUMBER) or text in YES_AND_NO else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def in_yaml(values: Mapping[str, Any]) -> str:
    """Dicts, lists, numbers, texts, true, false and null, in their order, a key a line."""
    written: str = yaml.dump(
        values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return written
