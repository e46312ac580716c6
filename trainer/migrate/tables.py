"""What becomes of every key and flag of another system, as rows for its page in the docs.

`docs/make_tables.py` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.config.keys import leaf_keys
from trainer.migrate.coati import flags as coati
from trainer.migrate.openrlhf import flags as openrlhf
from trainer.migrate.trl import flags as trl
from trainer.ppo.config import PPOConfig
from trainer.ppo.verl import keys as verl

Rows = list[list[str]]
"""(there, here)."""


def verl_rows() -> Rows:
    """Keys of verl's PPO trainer that are no keys here by the same name."""
    fields = {key.rules.verl: key.name for key in leaf_keys(PPOConfig) if key.rules.verl}
    rows = _rows("", fields | verl.RENAMED, "`{}`")
    rows += _rows("", verl.CHANGES_NOTHING, "changes nothing: {}")
    for name, (values, way_out) in verl.CHANGES_NOTHING_AT.items():
        listed = ", ".join(f"`{value}`" for value in values)
        rows.append([f"`{name}`", f"changes nothing at {listed}; else: {way_out}"])
    for name, (of_actor, _) in verl.AS_THE_ACTORS.items():
        rows.append([f"`{name}`", f"changes nothing at the actor's value; else: set `{of_actor}`"])
    rows += _rows("", verl.NOT_HERE, "not here: {}")
    return sorted(rows)


def trl_rows() -> Rows:
    """Fields of TRL's four configurations; those of one command with its name."""
    rows = _rows("", trl.RENAMED, "`{}`") + _rows("", trl.TOGETHER, "{}")
    rows += _rows("", trl.ALWAYS, "always: {}") + _rows("", trl.ABSENT, "not here: {}")
    for program in trl.PROGRAMS:
        rows += _rows(program, trl.RENAMED_IN[program], "`{}`")
        rows += _rows(program, trl.TOGETHER_IN[program], "{}")
        rows += _rows(program, trl.ABSENT_IN[program], "not here: {}")
    return sorted(rows)


def coati_rows() -> Rows:
    """Flags of ColossalChat's PPO scripts."""
    rows = _rows("", coati.RENAMED, "`{}`", dashes="--")
    rows += _rows("", coati.TOGETHER, "{}", dashes="--")
    rows += _rows("", coati.ALWAYS, "always: {}", dashes="--")
    return sorted(rows + _rows("", coati.ABSENT, "not here: {}", dashes="--"))


def openrlhf_rows() -> Rows:
    """Flags of `train_ppo_ray`, in both spellings."""
    newer = {old: new for new, old in openrlhf.NEW_NAMES.items()}
    absent = openrlhf.ABSENT | openrlhf.IF_ONE
    rows = []
    for name in sorted({*newer, *openrlhf.RENAMED, *openrlhf.ALWAYS, *absent}):
        spelled = " ".join(f"`--{flag}`" for flag in (name, newer.get(name, "")) if flag)
        if name in openrlhf.RENAMED:
            here = f"`{openrlhf.RENAMED[name]}`"
        elif name in openrlhf.ALWAYS:
            here = f"always: {openrlhf.ALWAYS[name]}"
        else:
            here = f"not here: {absent[name]}" if name in absent else "translated with others"
        rows.append([spelled, here])
    return rows


def _rows(program: str, table: Mapping[str, str], here: str, dashes: str = "") -> Rows:
    """A row for every entry; `here` holds its value."""
    of_program = f" ({program})" if program else ""
    return [[f"`{dashes}{name}`{of_program}", here.format(value)] for name, value in table.items()]
