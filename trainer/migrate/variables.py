"""The variables that a shell script sets: a translated run is checked with their values.

    values = variables_of('TP=4\\nN=${N:-5}\\nexport FILES="$HOME/a.parquet"')
    filled("n=$N, tp=${TP}", values)                 # "n=5, tp=4"

The translation itself keeps the variables. What only the shell knows stays as it is: `$HOME`,
`$(...)`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

ASSIGNMENT = re.compile(r"\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)")
REFERENCE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>\w+)(?::?-(?P<default>[^}]*))?\})"
)


def variables_of(text: str) -> dict[str, str]:
    """Name -> value, of the lines that do nothing but set one."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        match = ASSIGNMENT.fullmatch(line)
        if match is None:
            continue
        try:
            words = shlex.split(match["value"], comments=True)
        except ValueError:
            continue
        if len(words) == 1:
            values[match["name"]] = filled(words[0], values)
    return values


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with the variables that are known, or have a default beside them."""

    def value_of(match: re.Match[str]) -> str:
        name = match["plain"] or match["braced"]
        if name in values:
            return values[name]
        return match["default"] or match[0]

    return REFERENCE.sub(value_of, text)
