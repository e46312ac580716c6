"""The systems whose commands are translated; what their run does not read is left out.

for done in migrate("verl", "run.sh"):
    print(done.command())
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.compose import load_config
from trainer.config.keys import Key, config_keys
from trainer.config.recipe import Recipe
from trainer.config.schema import RunConfig
from trainer.config.unused_keys import why_unused
from trainer.detached.recipe import DETACHED
from trainer.migrate import coati, openrlhf, trl, verl
from trainer.migrate.record import SECRET, record, source_text
from trainer.migrate.recorder import LAUNCHERS, Command, Recording
from trainer.migrate.translation import Translation
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError, nearest
from verl_like.process.supervisor import ENDED_WELL


@dataclass(frozen=True)
class System:
    """How commands of a system are read."""

    trains: str
    """Programs that train, for refusals."""
    translate: Callable[[Command], Translation | None]
    """None of a command that is no training."""
    read_text: Callable[[str], Translation | None] = lambda _: None
    """None of a text that is a shell's."""


SYSTEMS: Mapping[str, System] = {
    "verl": System("main_ppo", verl.translate),
    "openrlhf": System("train_ppo_ray, train_sft, train_rm, train_dpo", openrlhf.translate),
    "trl": System("grpo, sft, reward, dpo, kto", trl.translate, trl.read_yaml),
    "coati": System("train_prompts", coati.translate),
    "colossalchat": System("train_prompts", coati.translate),
    "chatgpt": System("train_prompts", coati.translate),
}
RECIPES: Mapping[str, Recipe[Any]] = {
    "ppo": PPO,
    "detached": DETACHED,
    "sft": SFT,
    "reward-model": REWARD_MODEL,
    "dpo": DPO,
}
"""Program of a translation -> its recipe."""


def migrate(
    system: str, source: str | Sequence[str], arguments: Sequence[str] = ()
) -> list[Translation]:
    """Every training that a script runs, or the words of one command, as settings that compose.

    `source` is a file, a text, or a list of words; `arguments` are the script's.
    """
    if system not in SYSTEMS:
        raise ConfigError(
            f"there is no translation from {system!r}.{nearest(system, SYSTEMS)} There are: "
            f"{', '.join(SYSTEMS)}."
        )
    if isinstance(source, str):
        if read := SYSTEMS[system].read_text(source_text(source)):
            return [_finished(read)]
        recording = record(source, arguments)
    else:
        recording = Recording([Command(list(source))], ENDED_WELL, "")

    found: dict[str, Translation] = {}
    refusals = []
    for command in recording.commands:
        is_alone = len(recording.commands) == 1
        if not is_alone and (command.words[0] in LAUNCHERS or _is_a_rest(command)):
            continue
        try:
            done = _translated(SYSTEMS[system], command, recording)
        except ConfigError as err:
            refusals.append(f"{shlex.join(command.words)[:80]} ...: {err}")
        else:
            if done is not None:
                found.setdefault(done.command(), done)
    if refusals:
        raise ConfigError("\n\n".join(dict.fromkeys(refusals)) + _unset(recording))
    if not found:
        raise ConfigError(_nothing_trains(SYSTEMS[system].trains, recording))
    return list(found.values())


def _translated(system: System, command: Command, recording: Recording) -> Translation | None:
    """A command's settings, with what the script has to do with it."""
    done = system.translate(command)
    if done is None:
        return None
    done.variables = [*done.variables, *recording.variables]
    done.source = command.words
    for name, value in sorted(command.environment.items()):
        shown = "..." if SECRET.search(name) else shlex.quote(value)
        done.environment.append(f"{name}={shown}")
    if recording.ending != ENDED_WELL:
        done.notices.append(f"the script {recording.ending}: it may train more than this")
    done.notices += [
        f"the script runs {each.words[0]} ... as a command of its own: no backslash before it"
        for each in recording.commands
        if _is_a_rest(each) and each is not command
    ]
    return _finished(done)


def _is_a_rest(command: Command) -> bool:
    """Whether it is settings or flags without a program, as behind a lost backslash."""
    return command.words[0].startswith("--") or verl.is_setting(command.words[0])


def _nothing_trains(programs: str, recording: Recording) -> str:
    """Why a script has no translation: what it ran, how it ended, what it said."""
    ran = [shlex.join(command.words)[:100] for command in recording.commands]
    words = f"no command runs {programs}: it runs {'; '.join(ran[-5:]) or 'nothing'}."
    if recording.ending != ENDED_WELL:
        words += f" The script {recording.ending}."
    said = [line for line in recording.printed.splitlines() if line.strip()]
    if said:
        words += " It said: " + " / ".join(said[-5:])
    words += " Arguments of a script stand behind it: verl-like migrate SYSTEM SCRIPT 8 ..."
    return words + _unset(recording)


def _unset(recording: Recording) -> str:
    if not recording.unset:
        return ""
    return f"\n\nThe script reads variables that nobody sets: {', '.join(recording.unset)}."


def _finished(done: Translation) -> Translation:
    """Without what nothing reads; refused where it is another experiment, or does not compose."""
    if done.refused:
        lines = "\n  ".join(done.refused)
        raise ConfigError(
            "the run would be another experiment without these, for which there is nothing here:"
            f"\n  {lines}"
        )
    try:
        config = _composed(done)
    except ConfigError as error:
        raise ConfigError(
            f"the command does not start as it is: {error}\n\n{done.report(None)}"
        ) from error
    for key in list(done.settings):
        if reason := _why_unread(config, key.removeprefix("+")):
            done.leave_out(key, reason)
    return done


def _why_unread(config: RunConfig, key: str) -> str | None:
    is_key = not key.startswith(("placement", "role_mapping.", "resource_pool_spec."))
    return why_unused(config, key) if is_key and "engine_kwargs." not in key else None


def _composed(done: Translation) -> RunConfig:
    """The configuration; of a variable that is not set a text has a stand-in, nothing else."""
    recipe = RECIPES[done.program]
    texts = {key.name for key in config_keys(recipe.schema) if _is_text(key)}
    is_variable = re.compile(
        rf"\$({'|'.join(map(re.escape, done.variables)) or '(?!)'})(?!\w)|\$\(\("
    )
    settings = []
    for key, value in done.settings.items():
        if not is_variable.search(value):
            settings.append(f"{key}={value}")
        elif key in texts:
            settings.append(f"{key}=given")
    config: RunConfig = load_config([], recipe, defaults=settings)
    return config


def _is_text(key: Key) -> bool:
    """Whether any text is a value of it."""
    return key.kind in (str, Any) and not (key.rules.choices or key.rules.registry)
