"""Translate a command of verl: `main_ppo` and the drivers that share its keys, and SFT.

    done = translate(Command(["python3", "-m", "verl.trainer.main_ppo", "algorithm.gamma=1"]))

`trainer.ppo.verl_keys`, which `verl-like ppo` uses as well, translates PPO keys; `verl_sft.yaml`
translates SFT keys. `verl.yaml` has the rules that take several keys together, and verl's defaults.
A command is rejected if leaving out one of its keys would change the experiment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from trainer.ppo.verl_keys import (
    TRACKERS,
    configuration,
    older_name_of,
    translate_key,
    with_trackers,
)
from trainer.tools.migrate.recorder import Command
from trainer.tools.migrate.translation import (
    CommandFlags,
    Table,
    Translation,
    as_flags,
    find_program,
    last_name,
)
from verl_like.errors import ConfigError

BYPASS = "algorithm.rollout_correction.bypass_mode"
SFT = ("*fsdp_sft_trainer", "*sft_trainer", "*sft_trainer_ray")
ONE_STEP_OFF, FULLY_ASYNC = "*one_step_off_policy*main_ppo", "*fully_async_main"
BY_KEYS = (
    *("*main_ppo", "*main_ppo_split", "*main_ppo_sync", "*main_dapo", "*main_entropy"),
    *(ONE_STEP_OFF, FULLY_ASYNC),
)
"""Drivers whose experiment is defined by their keys."""
OTHERS = ("verl.*main_*", "recipe.*main_*")
"""Drivers with their own code."""
SETTING = re.compile(r"\+{0,2}(?P<key>[\w./@-]+)=(?P<value>.*)", re.S)
"""A setting that may contain shell variables, which Hydra's parser rejects."""
WITH_IMAGES = re.compile(r"(?i)(?<![a-z])(vl|vlm|vision|llava|omni|internvl)(?![a-z])")
"""Names of models that read images."""
FREEZES = "actor_rollout_ref.actor.freeze_vision_tower"
MODULES = {
    "linear_qkv": "q_proj,k_proj,v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj,up_proj",
    "linear_fc2": "down_proj",
}
"""Megatron's names of layers -> those of transformers."""


def translate(command: Command) -> Translation | None:
    """Return our settings and a line on every changed key; None if the command does not train."""
    words = command.words
    match = find_program(words, lambda name: _fits(name, *SFT, *BY_KEYS, *OTHERS))
    if match is None:
        if not all(is_setting(word) for word in words):
            return None
        match = [], "main_ppo", words
    launcher, program, words = match
    if not _fits(program, *SFT, *BY_KEYS):
        raise ConfigError(
            f"{program} is a driver with custom code, which has no counterpart here; the "
            "supported drivers are main_ppo, main_ppo_split, main_dapo, main_entropy, "
            "fully_async_main, one_step_off_policy, and the SFT trainers. To sample and score "
            "without training, use verl-like eval and examples/best_of_n."
        )
    if _fits(program, *SFT):
        settings = _settings_of(words)
        done = translate_sft(last_name(program), launcher, settings)
        _trains_tower(settings, "model", done)
        return done

    done = Translation()
    folders = [Path(command.folder), Path(command.folder, *program.split(".")[:-1])]
    flags = as_flags(words)
    name, path = (
        next((value for flag in names for value in flags.get(flag, [])), "")
        for names in (("config-name",), ("config-path", "config-dir"))
    )
    file, settings = configuration(name, path, folders)
    if file is not None:
        done.always.append(f"--config-name {name}: its keys are those of {file}")
    settings |= _settings_of(words)
    if "megatron" in name:
        settings.setdefault("model_engine", "megatron")
    _name_the_teacher(settings)
    done.original = dict(settings)
    _trains_tower(settings, "actor_rollout_ref.model", done)
    if _fits(program, FULLY_ASYNC, ONE_STEP_OFF):
        done.program = "async"
        is_fully = _fits(program, FULLY_ASYNC)
        takes_theirs = settings.get("async_training.use_rollout_log_probs", "True")
        _apply("async", settings, done)
        _apply("fully_async" if is_fully else "one_step_off", settings, done)
        settings.setdefault(BYPASS, takes_theirs if is_fully else "True")
    elif program.endswith("main_ppo_split"):
        done.rename("main_ppo_split.py", {"placement": "split"})
    _apply("before", settings, done)
    for key, value in settings.items():
        _translate_key(key, value, settings, done)
    _apply("after", settings, done)
    return done


def _apply(section: str, settings: dict[str, str], done: Translation) -> None:
    """Apply the rules of a section of `verl.yaml`."""
    table = Table("verl", section)
    flags = CommandFlags(table, {key: [value] for key, value in settings.items()}, "", done, "")
    flags.apply(table.rules, settings)


def _fits(name: str, *patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_setting(word: str) -> bool:
    """Return whether the word is a setting, not a program."""
    return "." in word.partition("=")[0] and SETTING.fullmatch(word) is not None


def _settings_of(words: Sequence[str]) -> dict[str, str]:
    """Return key -> value of the command's settings; reject other words."""
    settings = {}
    words = [word for word in words if word]
    for place, word in enumerate(words):
        if word.startswith("--config") or (
            place and words[place - 1] in ("--config-name", "--config-path")
        ):
            continue
        match = SETTING.fullmatch(word)
        if match is None:
            raise ConfigError(f"{word!r} is not a setting `key=value`.")
        if not match["key"].startswith("hydra."):
            settings[older_name_of(match["key"])] = match["value"]
    return settings


def _name_the_teacher(settings: dict[str, str]) -> None:
    """Rename the keys of a teacher with its own name, if there is only one teacher."""
    teachers = "distillation.teacher_models."
    keys = [key for key in settings if key.startswith(teachers)]
    if len({key.split(".")[2] for key in keys}) == 1:
        for key in keys:
            name = ".".join(["teacher_model", *key.split(".")[3:]])
            settings[f"{teachers}{name}"] = settings.pop(key)


def _trains_tower(settings: Mapping[str, str], model: str, done: Translation) -> None:
    """Train the vision tower as verl does by default; the model's name identifies such models.

    `model` is the section of the model.
    """
    reads_images = WITH_IMAGES.search(settings.get(f"{model}.path", ""))
    has_lora = settings.get(f"{model}.lora_rank", "0") != "0"
    if (reads_images or "data.image_key" in settings) and not has_lora and FREEZES not in settings:
        done.default(FREEZES, "false", {f"{model}.freeze_vision_tower": "false"})


def _translate_key(key: str, value: str, settings: Mapping[str, str], done: Translation) -> None:
    """Translate one key."""
    outcome = translate_key(key, value, settings)
    if outcome is None:
        done.rejected.append(
            f"{key}={value}: no such key is known here; remove it from the command if the training "
            "is the same without it"
        )
    elif outcome.nothing:
        done.always.append(f"{key}={value}: {outcome.nothing}")
    elif outcome.rejected:
        (done.absent if outcome.lays_out else done.rejected).append(
            f"{key}={value}: {outcome.rejected}"
        )
    elif not value:
        done.rejected.append(
            f"{key} is empty: the script reads its value from a variable, an argument or the "
            "output of a program. Set it with NAME=... verl-like migrate verl SCRIPT ARGUMENTS"
        )
    elif "${" in value:
        done.rejected.append(f"{key}={value}: replace the variable with its value")
    elif outcome.key == "trainer.logger":
        known, others = with_trackers(value)
        done.settings[key] = f"[{','.join(known)}]"
        words = f"trackers are {', '.join(TRACKERS)}, or your own with a dotted path"
        done.absent += [f"trainer.logger {name}: {words}" for name in others]
    elif ".engine_kwargs." in outcome.key and ".vllm." not in key:
        done.absent.append(f"{key}={value}: the engine is vLLM")
    else:
        ours = outcome.value
        if outcome.key.endswith(".target_modules"):
            ours = re.sub(r"linear_\w+", lambda name: MODULES.get(name[0], name[0]), ours)
        if (outcome.key, ours) == (key, value):
            done.settings[key] = value
        else:
            done.rename(f"{key} {value}", {outcome.key: ours})


def translate_sft(
    program: str, launcher: Sequence[str], settings: Mapping[str, str]
) -> Translation:
    """Return our settings, and a line on every key."""
    which = "fsdp_sft_trainer" if program == "fsdp_sft_trainer" else "sft_trainer"
    started = {name.replace("_", "-"): values for name, values in as_flags(launcher).items()}
    figures: dict[str, int | str] = {}
    for figure, flag, key in (
        ("nodes", "nnodes", "trainer.nnodes"),
        ("gpus", "nproc-per-node", "trainer.n_gpus_per_node"),
    ):
        text = "".join(started.get(flag, [])[:1]) or settings.get(key, "1")
        figures[figure] = int(text) if text.isdigit() else text
    keys = CommandFlags(
        Table("verl_sft", which, "all"),
        {key: [value] for key, value in settings.items()},
        f"verl's {which} has no key",
        Translation("sft"),
        dashes="",
        figures=figures,
    )
    here, _ = with_trackers(keys.value("trainer.logger", "[console,wandb]"))
    keys.becomes("trainer.logger", {"trainer.logger": here})
    keys.done.default("trainer.logger", "[console,wandb]", {"trainer.logger": here})
    return keys.finish()
