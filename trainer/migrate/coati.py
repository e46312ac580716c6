"""Translate a command of ColossalChat's `train_prompts.py`, or of a maker-and-trainer script.

The math is `algorithm=coati_legacy`. `train_prompts.py` becomes `verl-like ppo` on one pool, the
other scripts become `verl-like async`. `coati.yaml` has the flags and the rules.
"""

from __future__ import annotations

from trainer.migrate.flags import (
    GivenFlags,
    Table,
    as_flags,
    find_program,
    last_name,
    num_processes,
)
from trainer.migrate.recorder import Command
from trainer.migrate.translation import Translation
from workers.config.model import STRATEGIES_ELSEWHERE

ASYNC = ("1mmt_prompt", "mmmt_prompt", "1mmt_dummy", "mmmt_dummy")
"""Scripts with makers and trainers on Ray; `train_prompts` is one group of processes."""
MARKS = {"num_makers", "num_trainers", "experience_steps", "trainer_strategy"}
"""Flags that identify a command line of makers and trainers if its script is missing."""


def translate(command: Command) -> Translation | None:
    """Return our settings and a line on every flag; None if the script does not train."""
    scripts = ("train_prompts", *ASYNC)
    match = find_program(command.words, lambda name: last_name(name) in scripts, "")
    if match is None:
        return None
    launcher, script, words = match
    script, given = last_name(script), as_flags(words)
    is_async = script in ASYNC or (not script and not MARKS.isdisjoint(given))
    program = "async" if is_async else "ppo"
    if script.startswith("1mmt"):
        given["num_makers"] = ["1"]
    flags = GivenFlags(
        Table("coati", program, "all"),
        given,
        "ColossalChat's PPO scripts have no flag",
        Translation(program, settings={"algorithm": "coati_legacy"}),
        figures={"processes": int(num_processes(launcher) or 1)},
    )
    for name in ("strategy", "trainer_strategy"):
        ours = STRATEGIES_ELSEWHERE.get(flags.value(name), flags.value(name))
        flags.becomes(name, {"actor_rollout_ref.actor.strategy": ours, "critic.strategy": ours})
    return flags.finish()
