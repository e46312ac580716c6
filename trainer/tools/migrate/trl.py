"""Translate a command or a YAML of TRL into our settings.

`trl.yaml` translates single fields; the rules here take several fields together. Scripts of TRL's
examples have these fields, too. `EXAMPLES` says which rows and rewards they have in their code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.keys import checked_yaml
from trainer.ppo.verl_keys import TRACKERS
from trainer.tools.migrate.recorder import Command
from trainer.tools.migrate.translation import (
    CommandFlags,
    Flags,
    Table,
    Translation,
    as_flags,
    as_text,
    find_program,
    last_name,
    num_processes,
)
from verl_like.errors import ConfigError
from verl_like.files import json_objects
from verl_like.record import STEPS

PROGRAMS = {
    **{"grpo": "ppo", "rloo": "ppo", "sft": "sft", "reward": "reward-model"},
    **{"dpo": "dpo", "kto": "dpo", "cpo": "dpo", "orpo": "dpo"},
}
"""TRL's command, or the name of its example script -> our command."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PLACES = {
    "model.": "actor_rollout_ref.model.",
    "optim.": f"{ACTOR}.optim.",
    "grad_clip": f"{ACTOR}.grad_clip",
    "checkpoint.": f"{ACTOR}.checkpoint.",
}
"""Prefix of a key of the recipes on rows -> its prefix in PPO."""
ROWS = "rows.parquet"
"""File of the rows that a script makes in its code."""
MATH = {
    "reward.list": "[{name: format, path: trl.rewards, function: think_format_reward}, "
    "{name: accuracy, path: trl.rewards, function: accuracy_reward}]",
}
MATH_ROWS = "its code writes the system prompt and `problem` into `prompt`, and keeps `solution`"
IMAGE_MATH = {**MATH, "data.image_key": "image"}
IMAGE_ROWS = f"{MATH_ROWS} and `image`"


@dataclass(frozen=True)
class Example:
    """The training of a script of TRL's examples, and what its code adds to its fields."""

    command: str
    rows: str = ""
    """The rows that its code makes, if it does not take those of the data set."""
    settings: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that its code sets."""


WHOLE_ROWS = {"max_length": "null"}
EXAMPLES = {
    **{name: Example(name) for name in PROGRAMS},
    "reward_modeling": Example("reward"),
    "dpo_vlm": Example("dpo"),
    "mpo_vlm": Example("dpo"),
    "sft_vlm": Example("sft", fields=WHOLE_ROWS),
    "sft_vlm_gemma3": Example("sft", fields=WHOLE_ROWS),
    "sft_gpt_oss": Example("sft"),
    "sft_nemotron_3": Example("sft", "its code writes `thinking` into the contents of `messages`"),
    "gspo": Example("grpo", MATH_ROWS, MATH),
    "gspo_vlm": Example("grpo", IMAGE_ROWS, IMAGE_MATH),
    "grpo_vlm": Example("grpo", IMAGE_ROWS, IMAGE_MATH),
    "rloo_vlm": Example("rloo", IMAGE_ROWS, IMAGE_MATH),
    "grpo_continuous_batching": Example(
        "grpo",
        "its code writes the system prompt and `question` into `prompt`, and the number after "
        "#### into `reference_answer`",
        {"reward.function.path": "{script}", "reward.function.name": "correctness_reward"},
    ),
}
"""Script -> its training."""
MMIU = "FanqingM/MMIU-Benchmark"
"""The data set that `sft_vlm_gemma3` downloads and converts in its code."""
HINTS = {
    "grpo_agent": " It has tools and rewards in its code: set environment.tools=[FILE.py:FUNCTION] "
    "and `reward.list` in the translation of `trl grpo`.",
    **dict.fromkeys(
        ("online_dpo", "online_dpo_vlm", "nash_md", "xpo"),
        " It samples pairs of responses during training; `verl-like ppo algorithm=grpo` samples "
        "groups.",
    ),
    **dict.fromkeys(
        ("gkd", "gold", "distillation", "sdft", "sdpo"),
        " Its loss compares distributions of teacher and student; here, the log-ratio to a "
        "teacher is an advantage (distillation.teacher_model.model_path).",
    ),
    "sft_gemma3": " It has its settings in its code: pass them as fields of `trl sft`.",
    "prm": " Rewards of steps within a response are not supported.",
    "bco": " `verl-like dpo loss=kto` is nearest: BCO shifts rewards by their running mean.",
    "tpo": " Triples with a gold response are not supported.",
}
"""Script -> what is nearest to it here."""
PLACES_OF_SCRIPTS = ("examples.scripts.", "trl.scripts.", "trl.experimental.")
TRL_COMMANDS = ("grpo", "rloo", "sft", "reward", "dpo", "kto")
"""Programs of `trl`."""
JSON_RATE = re.compile(r'\{\s*"?min_lr_rate"?\s*:\s*([\d.e-]+)\s*\}')
IMPORTS_TRL = re.compile(r"^(from|import) trl\b", re.MULTILINE)
FIELD = re.compile(r"\w+:(\s|$)")
MARKS = {
    "rloo": ("normalize_advantages", "reward_clip_range"),
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "epsilon", "use_vllm"),
    "cpo": ("cpo_alpha",),
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
    script = command.words[len(launcher)]
    if name and last_name(name) not in EXAMPLES:
        raise ConfigError(
            f"{script} has no counterpart here; the supported scripts are "
            f"{', '.join(EXAMPLES)}.{HINTS.get(last_name(name), '')}"
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
        fields = _flags_from_yaml(file.read_text(encoding="utf-8")) | fields
    processes = _processes(launcher, command)
    if processes:
        fields = {"num_processes": [processes]} | fields
    example = EXAMPLES.get(last_name(name)) or Example(_known_by_its_fields(fields))
    if "model_name_or_path" not in fields and name.startswith("examples."):
        raise ConfigError(
            f"{script} names no model: it has its settings in its code. Pass them as fields of "
            f"`trl {example.command}`."
        )
    fields |= {field: [value] for field, value in example.fields.items()}
    done = _translated(example.command, fields)
    _add_example(done, example, script)
    if not processes and {"trl", "accelerate"} & {word.rpartition("/")[2] for word in launcher}:
        done.absent.append(
            "number of processes, which multiplies the rows of a step: 1 is assumed; accelerate "
            "uses every GPU unless you set --num_processes"
        )
    return done


def _add_example(done: Translation, example: Example, script: str) -> None:
    """Add the rows and the rewards that a script has in its code."""
    for key, value in example.settings.items():
        done.default(script, "its code", {key: value.replace("{script}", script)})
    data_set = done.original.get("dataset_name", "")
    rows = "its code downloads images and makes `messages`" if data_set == MMIU else example.rows
    if rows:
        done.rename(f"the rows of {script}", {"data.train_files": ROWS})
        done.incomplete.append(f"{script} makes its rows: write them into {ROWS} ({rows})")


def read_yaml(text: str) -> Translation | None:
    """Return the settings of a YAML without a command; None if the text is no YAML of fields."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines or not all(FIELD.match(line) for line in lines if line[0] not in " -"):
        return None
    fields = _flags_from_yaml(text)
    return _translated(_known_by_its_fields(fields), fields)


def read_record(folder: Path) -> Translation | None:
    """Return the settings of a run that `RecordCallback` recorded; None without such a record."""
    heads, _ = json_objects(folder / STEPS, '"record"')
    config = heads[0].get("config", {}) if heads else {}
    if "given" not in config:
        return None
    program, rewards = config["trainer"], config["reward_funcs"]
    if program not in PROGRAMS:
        raise ConfigError(f"{folder}: TRL's {program} has no counterpart here.{HINTS.get(program)}")
    names = [name for name in config["given"] if name != "reward_weights"]
    fields = {name: [as_text(config[name])] for name in ("model_name_or_path", *names)}
    done = _translated(program, fields)
    done.rename("the rows of trainer.train_dataset", {"data.train_files": ROWS})
    done.incomplete.append(
        f"write the rows by trainer.train_dataset.to_parquet({ROWS!r}) in the script, or set "
        "data.train_files to their file"
    )
    if rewards:
        items = _reward_items(rewards, config.get("reward_weights") or [1.0] * len(rewards))
        done.rename("reward_funcs", {"reward.list": f"[{', '.join(items)}]"})
    for path in {reward.rpartition(":")[0] for reward in rewards}:
        if os.path.isfile(path) and IMPORTS_TRL.search(Path(path).read_text(encoding="utf-8")):
            done.incomplete.append(
                f"{path} imports trl: move its reward functions into another file, and name it in "
                "reward.list"
            )
    return done


def _reward_items(rewards: Sequence[str], weights: Sequence[float]) -> list[str]:
    """Return the items of `reward.list` for files with functions, or models."""
    items, names = [], list[str]()
    for reward, weight in zip(rewards, weights, strict=True):
        path, _, function = reward.rpartition(":")
        name = function if path else last_name(reward.replace("/", "."))
        names.append(name)
        name += str(names.count(name)) if names.count(name) > 1 else ""
        place = f"path: {path}, function: {function}" if path else f"kind: model, path: {reward}"
        items.append(f"{{name: {name}, {place}, weight: {weight}}}")
    return items


def _is_program(name: str, words: Sequence[str]) -> bool:
    """Return whether a command is `trl`, or a module, script or file of TRL."""
    if words[0].rpartition("/")[2] == "trl":
        return name in TRL_COMMANDS
    is_file = any(word.endswith(f"{last_name(name)}.py") for word in words)
    return name.startswith(PLACES_OF_SCRIPTS) or (last_name(name) in EXAMPLES and is_file)


def _processes(launcher: Sequence[str], command: Command) -> str:
    """Return the launcher's processes, by its flags, accelerate's YAML or the visible GPUs."""
    number = num_processes(launcher)
    if number:
        return number
    path = "".join(as_flags(launcher).get("config_file", [])[:1])
    file = Path(command.folder, path)
    if path and file.is_file():
        return "".join(_flags_from_yaml(file.read_text(encoding="utf-8")).get("num_processes", []))
    gpus = command.environment.get("CUDA_VISIBLE_DEVICES")
    if launcher and gpus:
        return str(len(gpus.split(",")))
    return ""


def _translated(program: str, flags: Flags) -> Translation:
    """Return the settings here for the flags of a program of TRL."""
    samples = PROGRAMS[program] == "ppo"
    done = Translation(PROGRAMS[program], places=PLACES if samples else {})
    table = Table("trl", "all", "samples" if samples else "rows", program)
    for name in [name for name in flags if name.startswith("no_")]:
        if table.find(name.removeprefix("no_")):  # how TRL's parser spells a switch that is off
            flags = {key: value for key, value in flags.items() if key != name}
            flags[name.removeprefix("no_")] = ["False"]
    done.original = {
        name: as_text(values) if len(values) > 1 else "".join(values)
        for name, values in flags.items()
    }
    fields = CommandFlags(table, flags, f"TRL's {program} has no field", done)
    trackers = fields.value("report_to", "none").strip("[]").replace(" ", ",").split(",")
    known = [name for name in trackers if name in TRACKERS and name != "console"]
    fields.becomes("report_to", {"trainer.logger": ["console", *known]})
    kwargs = JSON_RATE.fullmatch(fields.value("lr_scheduler_kwargs"))
    if kwargs and fields.value("lr_scheduler_type") == "cosine_with_min_lr":
        fields.becomes("lr_scheduler_kwargs", {"optim.min_lr_ratio": kwargs[1]})
    if fields.figure("packing"):
        done.variables = ["ROW_TOKENS"]
    return fields.finish()


def _flags_from_yaml(text: str) -> Flags:
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
