"""Translate a command or a YAML of TRL into our settings: `grpo`, `sft`, `reward`, `dpo`, `kto`.

`trl.yaml` translates single fields; the rules here take several fields together. Scripts of TRL's
examples use these fields, too, unless they add their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.flat import checked_yaml
from trainer.migrate.flags import (
    Flags,
    GivenFlags,
    Table,
    as_flags,
    find_program,
    last_name,
    num_processes,
)
from trainer.migrate.recorder import Command
from trainer.migrate.translation import Translation, as_text
from trainer.ppo.verl import TRACKERS
from verl_like.errors import ConfigError

PROGRAMS = {"grpo": "ppo", "sft": "sft", "reward": "reward-model", "dpo": "dpo", "kto": "dpo"}
"""TRL's command -> ours."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PLACES = {
    "model.": "actor_rollout_ref.model.",
    "optim.": f"{ACTOR}.optim.",
    "grad_clip": f"{ACTOR}.grad_clip",
    "checkpoint.": f"{ACTOR}.checkpoint.",
}
"""Prefix of a key of the recipes on rows -> its prefix in PPO."""
SCRIPTS = {**{name: name for name in PROGRAMS}, "reward_modeling": "reward"}
"""Script -> the command that it corresponds to."""
HINTS = {
    "orpo": " `verl-like dpo loss=orpo` differs: its NLL is a mean per pair, over the response; in "
    "TRL, it is a mean over all tokens of a pass, and the prompt is in it."
}
"""Script -> what is nearest to it here."""
PLACES_OF_SCRIPTS = ("examples.scripts.", "trl.scripts.", "trl.experimental.")
FIELD = re.compile(r"\w+:(\s|$)")
MARKS = {
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "epsilon", "use_vllm"),
    "reward": ("center_rewards_coefficient",),
    "kto": ("desirable_weight", "undesirable_weight"),
    "dpo": ("beta", "precompute_ref_log_probs", "ld_alpha", "sync_ref_model"),
    "sft": ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field"),
}
"""Fields that identify a YAML without a command, tried in this order."""


def translate(command: Command) -> Translation | None:
    """Return our settings and a line on every field; None if the script does not train."""
    match = find_program(command.words, lambda name: _is_program(name, command.words), "")
    if match is None:
        return None
    launcher, name, words = match
    if name and last_name(name) not in SCRIPTS:
        raise ConfigError(
            f"{command.words[len(launcher)]} has no counterpart here; the supported scripts are "
            f"{', '.join(SCRIPTS)}.{HINTS.get(last_name(name), '')}"
        )
    fields = {name.replace("-", "_"): values for name, values in as_flags(words).items()}
    if "lora_target_modules" in fields:  # some scripts separate them by commas
        modules = ",".join(fields["lora_target_modules"]).split(",")
        fields["lora_target_modules"] = [module for module in modules if module]
    path = " ".join(fields.pop("config", []))
    if path:
        file = Path(command.folder, path)
        if not file.is_file():
            raise ConfigError(f"--config {path}: there is no such file. Use the path of the file.")
        fields = _of_yaml(file.read_text(encoding="utf-8")) | fields
    processes = _processes(launcher, command)
    if processes:
        fields = {"num_processes": [processes]} | fields
    done = _translated(SCRIPTS.get(last_name(name), "") or _known_by_its_fields(fields), fields)
    if not processes and {"trl", "accelerate"} & {word.rpartition("/")[2] for word in launcher}:
        done.absent.append(
            "number of processes, which multiplies the rows of a step: 1 is assumed; accelerate "
            "uses every GPU unless you set --num_processes"
        )
    return done


def read_yaml(text: str) -> Translation | None:
    """Return the settings of a YAML without a command; None if the text is no YAML of fields."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines or not all(FIELD.match(line) for line in lines if line[0] not in " -"):
        return None
    fields = _of_yaml(text)
    return _translated(_known_by_its_fields(fields), fields)


def _is_program(name: str, words: Sequence[str]) -> bool:
    """Return whether a command is `trl`, or a module, script or file of TRL."""
    if words[0].rpartition("/")[2] == "trl":
        return name in PROGRAMS
    is_file = any(word.endswith(f"{last_name(name)}.py") for word in words)
    return name.startswith(PLACES_OF_SCRIPTS) or (last_name(name) in SCRIPTS and is_file)


def _processes(launcher: Sequence[str], command: Command) -> str:
    """Return the launcher's processes, by its flags, accelerate's YAML or the visible GPUs."""
    if number := num_processes(launcher):
        return number
    path = "".join(as_flags(launcher).get("config_file", [])[:1])
    if path and (file := Path(command.folder, path)).is_file():
        return "".join(_of_yaml(file.read_text(encoding="utf-8")).get("num_processes", []))
    if launcher and (gpus := command.environment.get("CUDA_VISIBLE_DEVICES")):
        return str(len(gpus.split(",")))
    return ""


def _translated(program: str, flags: Flags) -> Translation:
    is_grpo = program == "grpo"
    done = Translation(PROGRAMS[program], places=PLACES if is_grpo else {})
    table = Table("trl", "all", "grpo") if is_grpo else Table("trl", "all", "rows", program)
    for name in [name for name in flags if name.startswith("no_")]:
        if table.find(name.removeprefix("no_")):  # how TRL's parser spells a switch that is off
            flags = {key: value for key, value in flags.items() if key != name}
            flags[name.removeprefix("no_")] = ["False"]
    done.original = {
        name: as_text(values) if len(values) > 1 else "".join(values)
        for name, values in flags.items()
    }
    fields = GivenFlags(table, flags, f"TRL's {program} has no field", done)
    trackers = fields.value("report_to", "none").strip("[]").replace(" ", ",").split(",")
    known = [name for name in trackers if name in TRACKERS and name != "console"]
    fields.becomes("report_to", {"trainer.logger": ["console", *known]})
    if fields.figure("packing"):
        done.variables = ["ROW_TOKENS"]
    return fields.finish()


def _of_yaml(text: str) -> Flags:
    try:
        tree = OmegaConf.to_container(OmegaConf.create(checked_yaml(text)))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"the YAML could not be read: {error}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError("the YAML has no `field: value` lines.")
    flags = {name: value for name, value in tree.items() if value is not None}
    flags |= {"max_length": "null"} if tree.get("max_length", 0) is None else {}
    return {str(name): [as_text(value)] for name, value in flags.items()}


def _known_by_its_fields(fields: Flags) -> str:
    for program, marks in MARKS.items():
        if any(mark in fields for mark in marks):
            return program
    raise ConfigError(
        f"the fields do not show which TRL trainer they are for ({', '.join(PROGRAMS)}). Use the "
        "whole command, such as `trl grpo --config FILE`."
    )
