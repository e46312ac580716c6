"""Translate commands of other frameworks, without the settings that the run does not read.

Example:

    for done in migrate("verl", "run.sh"):
        print(done.command())
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.async_training.recipe import ASYNC
from trainer.config.compose import load_config
from trainer.config.keys import config_keys
from trainer.config.schema import Recipe, RunConfig
from trainer.config.unused_keys import unused_reason
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT
from trainer.tools.migrate import openrlhf, trl, verl
from trainer.tools.migrate.recorder import (
    LAUNCHERS,
    SECRET,
    Command,
    Recording,
    is_page,
    is_python,
    record,
    source_text,
)
from trainer.tools.migrate.translation import (
    CommandFlags,
    Table,
    Translation,
    as_flags,
    find_program,
    last_name,
    num_processes,
)
from verl_like.errors import ConfigError, nearest
from verl_like.process.supervisor import ENDED_WELL
from workers.config.model import STRATEGIES_ELSEWHERE

MAKER_SCRIPTS = ("1mmt_prompt", "mmmt_prompt", "1mmt_dummy", "mmmt_dummy")
"""ColossalChat's scripts with makers and trainers on Ray; `train_prompts` has one group."""
MARKS = {"num_makers", "num_trainers", "experience_steps", "trainer_strategy"}
"""Flags that identify a command line of makers and trainers if its script is missing."""


def translate_coati(command: Command) -> Translation | None:
    """Translate a command of ColossalChat's `train_prompts.py` or of its maker-and-trainer scripts.

    The math is `algorithm=coati_legacy`; `coati.yaml` has the flags and the rules. Return None for
    other commands.
    """
    scripts = ("train_prompts", *MAKER_SCRIPTS)
    match = find_program(command.words, lambda name: last_name(name) in scripts, "")
    if match is None:
        return None
    launcher, script, words = match
    script, options = last_name(script), as_flags(words)
    is_async = script in MAKER_SCRIPTS or (not script and not MARKS.isdisjoint(options))
    program = "async" if is_async else "ppo"
    if script.startswith("1mmt"):
        options["num_makers"] = ["1"]
    flags = CommandFlags(
        Table("coati", program, "all"),
        options,
        "ColossalChat's PPO scripts have no flag",
        Translation(program, settings={"algorithm": "coati_legacy"}),
        figures={"processes": int(num_processes(launcher) or 1)},
    )
    for name in ("strategy", "trainer_strategy"):
        ours = STRATEGIES_ELSEWHERE.get(flags.value(name), flags.value(name))
        flags.becomes(name, {"actor_rollout_ref.actor.strategy": ours, "critic.strategy": ours})
    return flags.finish()


@dataclass(frozen=True)
class System:
    """The functions that read commands of a system."""

    trains: str
    """Programs that train, for messages."""
    translate: Callable[[Command], Translation | None]
    """Returns None for a command that does not train."""
    read_text: Callable[[str], Translation | None] = lambda _: None
    """Returns None for a text that is a shell script."""
    read_record: Callable[[Path], Translation | None] = lambda _: None
    """Returns None for a folder without a record."""
    hint: str = ""
    """The last line of a message: the way to translate a program with settings in its code."""
    has_rules: bool = False
    """True if a command needs no reward, because rows name built-in rules."""


COATI = System("train_prompts", translate_coati)
OTHER_NAMES = "coati", "chatgpt"
SYSTEMS: Mapping[str, System] = {
    "verl": System("main_ppo", verl.translate, has_rules=True),
    "openrlhf": System("train_ppo_ray, train_sft, train_rm, train_dpo", openrlhf.translate),
    "trl": System(
        ", ".join(trl.PROGRAMS),
        trl.translate,
        trl.read_yaml,
        trl.read_record,
        hint="\nIf it has its settings in its code, record a step of it (docs/coming_from_trl.md), "
        "and pass the record's folder.",
    ),
    **dict.fromkeys(("colossalchat", *OTHER_NAMES), COATI),
}
SCORED = {"reward.function.path", "reward.list", "reward.model.enable"}
"""Settings that name a reward."""
NO_REWARD = (
    "the command names no reward. Add reward.function.path=FILE.py with a function compute_score, "
    "or `reward.list` for several."
)
RECIPES: Mapping[str, Recipe[Any]] = {
    **{"ppo": PPO, "async": ASYNC, "sft": SFT},
    **{"reward-model": REWARD_MODEL, "dpo": DPO},
}
"""Program of a translation -> its recipe."""


def migrate(
    system: str, source: str | Sequence[str], arguments: Sequence[str] = ()
) -> list[Translation]:
    """Return the settings of every training that a script, or one command, starts.

        for done in migrate("verl", "run.sh", ["8"]):
            print(done.command())                       # a command of this project
            config = load_config(done.overrides())      # for PPO; `done.program` names the recipe

    Args:
        system: verl, openrlhf, trl or colossalchat.
        source: the script's file, its text, or the words of one command.
        arguments: the script's arguments.

    Raises:
        ConfigError: the system is unknown, the script starts no training, or a flag that changes
            the experiment has no equivalent here.
    """
    if system not in SYSTEMS:
        raise ConfigError(
            f"there is no translation from {system!r}.{nearest(system, SYSTEMS)} Known: "
            f"{', '.join(name for name in SYSTEMS if name not in OTHER_NAMES)}."
        )
    reader = SYSTEMS[system]
    recording = Recording([Command(list(source))], ENDED_WELL, "")
    if isinstance(source, str):
        done = reader.read_record(Path(source)) if os.path.isdir(source) else None
        if done:
            return [_finished(done, reader)]
        done = reader.read_text(source_text(source))
        if done:
            return [_finished(done, reader)]
        recording = record(source, arguments)

    translations: dict[str, Translation] = {}
    rejections = list[str]()
    is_alone = len(recording.commands) == 1
    for command in recording.commands:
        if not is_alone and (command.words[0] in LAUNCHERS or _is_a_rest(command)):
            continue
        try:
            done = reader.translate(command)
            if done:
                _add_context(done, command, recording)
                translations.setdefault(_finished(done, reader).command(), done)
        except ConfigError as err:
            rejections.append(f"{_shortened(command)}: {err}")
    if translations and not rejections:
        return list(translations.values())
    problem = "\n\n".join(dict.fromkeys(rejections)) or _no_training(reader, recording)
    if not rejections and isinstance(source, str):
        if is_python(source) and not recording.commands:
            raise ConfigError(
                f"{source} is a Python program, and its docstring has no command with flags. Pass "
                f"the command that starts its training, in quotes.{reader.hint}"
            )
        if is_page(source_text(source)) and not is_python(source):
            raise ConfigError(
                "this is a page of prose, not a script. Copy the training command from it into a "
                "file, or pass the command itself in quotes."
            )
        problem += f"\n{_how_to_run(system, source)}{reader.hint}"
    if recording.unset:
        problem += (
            f"\n\nThe script reads variables that are never set: {', '.join(recording.unset)}."
        )
    raise ConfigError(problem)


def _add_context(done: Translation, command: Command, recording: Recording) -> None:
    """Add the command's context in the script: variables, environment, and problems."""
    done.variables = [*done.variables, *recording.variables]
    done.source = command.words
    for name, value in sorted(command.environment.items()):
        shown = "..." if SECRET.search(name) else shlex.quote(value)
        done.environment.append(f"{name}={shown}")
    if recording.num_numbered:
        done.notices.append(
            f"the line numbers of the page (up to {recording.num_numbered}) are left out"
        )
    if recording.ending != ENDED_WELL:
        done.notices.append(f"the script {recording.ending}: it may train more than this")
    done.notices += [
        f"the script runs {other.words[0]} ... as a separate command: a backslash may be missing "
        "at the end of the line before it"
        for other in recording.commands
        if _is_a_rest(other) and other is not command
    ]


def _no_training(reader: System, recording: Recording) -> str:
    """Describe a script, or a command, that does not train."""
    ran = [_shortened(command) for command in recording.commands]
    words = "the script starts no program."
    if ran:
        words = f"there is no command of {reader.trains}; the commands are: {'; '.join(ran[-5:])}."
    if recording.ending != ENDED_WELL:
        words += f" The script {recording.ending}."
    output = [line for line in recording.printed.splitlines() if line.strip()]
    if output:
        words += " Its output: " + " / ".join(output[-5:])
    return words


def _how_to_run(system: str, source: str) -> str:
    """Say how to give a script the arguments and variables that it needs."""
    code = re.sub(r"(?m)^\s*#.*", "", source_text(source))
    last = max(map(int, re.findall(r"\$\{?([1-9])(?!\w)", code)), default=0)
    needed = dict.fromkeys(re.findall(r"\$\{(\w+):?\?", code))
    script = source if os.path.isfile(source) else "SCRIPT"
    words = [
        *(f"{name}=..." for name in needed if not name.isdigit()),
        f"verl-like migrate {system} {script}",
        *(f"ARGUMENT{number}" for number in range(1, last + 1)),
    ]
    if len(words) == 1:
        words.append("ARGUMENT ...")
    return f"If it needs arguments or variables, set them: {' '.join(words)}"


def _shortened(command: Command) -> str:
    """Return the first words of a command."""
    return textwrap.shorten(shlex.join(command.words), 100, placeholder=" ...")


def _is_a_rest(command: Command) -> bool:
    """Return whether a command has settings but no program, as after a missing backslash."""
    return command.words[0].startswith("--") or verl.is_setting(command.words[0])


def _finished(done: Translation, system: System) -> Translation:
    """Drop unread settings; reject a different experiment or an invalid configuration."""
    if done.rejected:
        lines = "\n  ".join(done.rejected)
        raise ConfigError(
            "these settings cannot be translated; without them the training would be another "
            f"one:\n  {lines}"
        )
    try:
        config = composed(done)
    except ConfigError as error:
        raise ConfigError(
            f"the translated command is incomplete or invalid: {error}\n\n{done.report()}"
        ) from error
    samples, scored = done.program in ("ppo", "async"), SCORED & done.settings.keys()
    if samples and not scored and not system.has_rules:
        done.incomplete.append(NO_REWARD)
    for setting in list(done.settings):
        key = setting.removeprefix("+")
        of_placement = key.startswith(("placement", "role_mapping.", "resource_pool_spec."))
        if of_placement or "engine_kwargs." in key:
            continue
        why = unused_reason(config, key)
        if why:
            done.leave_out(setting, why)
    return done


def composed(done: Translation) -> RunConfig:
    """Return the configuration; variables in texts get a stand-in, other variables are left out."""
    recipe = RECIPES[done.program]
    keys = [key for key in config_keys(recipe.schema) if key.kind in (str, Any)]
    texts = {key.name for key in keys if not (key.rules.choices or key.rules.registry)}
    names = "|".join(map(re.escape, done.variables)) or "(?!)"
    is_variable = re.compile(rf"\$({names})(?!\w)|\$\(\(")
    settings = [
        f"{key}={'given' if is_variable.search(value) else value}"
        for key, value in done.settings.items()
        if key in texts or not is_variable.search(value)
    ]
    config: RunConfig = load_config([], recipe, defaults=settings)
    return config
