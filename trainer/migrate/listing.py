"""A listing in Python, as papers and READMEs print it, answered line by line.

`listings.yaml` says what becomes of a line; a line that it does not know is told as such.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainer.migrate.table import FOLDER
from trainer.migrate.translation import Translation

FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.S | re.M)
CONSTANT = re.compile(r"(\w+) = ([\d.e-]+|'[^']*'|\"[^\"]*\")")
MAKERS = ("ExperienceMakerHolder", "DetachedPPOTrainer")
NOT_KNOWN = "not known here"


def read(system: str, text: str) -> Translation | None:
    """The settings of a listing; None where the text is no Python of that system's."""
    return translate(system, text) if re.search(_rows(system)["marks"], text) else None


def translate(system: str, text: str) -> Translation:
    """The settings of a listing, and an answer to every line that says something."""
    done = Translation("detached" if any(name in text for name in MAKERS) else "ppo")
    if system == "chatgpt":
        done.settings["algorithm"] = "coati_legacy"
    lines = code_of(text)
    matches = [match for line in lines if (match := CONSTANT.fullmatch(line))]
    constants = {match[1]: match[2].strip("'\"") for match in matches}
    for line in lines:
        done.lines.append((line, _answer(system, line, constants, done)))
    done.variables = re.findall(r"\$(\w+)", " ".join(done.settings.values())) or ["MODEL"]
    if system == "chatgpt":
        decay = "actor_rollout_ref.actor.optim.weight_decay"
        done.default("HybridAdam's weight decay", 0, {decay: 0})
    return done


def _answer(system: str, line: str, constants: Mapping[str, str], done: Translation) -> str:
    for row in _rows(system)["lines"]:
        if match := re.search(row["line"], line):
            for key, value in row.get("set", {}).items():
                ours = match.expand(value) if isinstance(value, str) else str(value)
                done.settings.setdefault(key, _with_values(ours, constants))
            return str(row["here"])
    return "read where it is used" if CONSTANT.fullmatch(line) else NOT_KNOWN


def _with_values(text: str, constants: Mapping[str, str]) -> str:
    """`$name`, `$4` and `$((name * 4))` with the listing's values; other names are the shell's."""
    if text.startswith("$(("):
        text = re.sub(r"[A-Za-z_]\w*", lambda name: constants.get(name[0], name[0]), text)
        numbers = re.fullmatch(r"\$\(\((\d+) \* (\d+)\)\)", text)
        return str(int(numbers[1]) * int(numbers[2])) if numbers else text
    name = text.removeprefix("$")
    return name if text[0] == "$" and name.isdigit() else constants.get(name, text)


def code_of(text: str) -> list[str]:
    """The lines of code, of fenced blocks where there are some; without brackets and comments."""
    blocks = FENCED.findall(text)
    code = "\n".join(map(textwrap.dedent, blocks)) if blocks else text
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in code.splitlines()]
    return [line for line in lines if re.search(r"\w", line) and not line.startswith("#")]


@cache
def _rows(system: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((FOLDER / "listings.yaml").read_text(encoding="utf-8"))
    return tree[system]  # type: ignore[no-any-return]
