r"""usage: verl-like check [RECIPE] [--gpus 8xH100] [--full] [--rehearse]
           [key=value ...]

Checks a run without starting it:

  verl-like check data.train_files=x actor_rollout_ref.model.path=y
  verl-like check --gpus 8xH100 --full placement=split data.train_files=x ...

It takes the settings of `verl-like RECIPE` (ppo, async, sft, reward-model or
dpo; by default ppo), raises the errors that the run would raise before it
starts a process, tries rewards on a few rows, and prints where roles run and
whether they fit the GPUs.

  --gpus 8xH100        check for these GPUs (in all), even on a laptop; or
                       --gpus 8 --device H100; 80GiB for any GPU of that size
  --full               also print the memory of every role, batch sizes, which
                       keys you, presets and the command changed, and which of
                       yours have no effect; with ppo and async also the calls
                       of a step, their overlap, and metrics to watch
  --measured RUN_DIR   with async: how long a PPO run generated and trained, and
                       so what asynchronous training gains (implies --full)
  --rehearse           then run two small steps on this machine's CPU, resume
                       for a third, and export: your data, code and checkpoints
                       with a tiny model of your model's class; it writes only
                       into a temporary folder
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from trainer.cli.main import RECIPES, resolve_command
from trainer.cli.plan_sections import ppo_sections, row_sections
from trainer.config.compose import as_object, compose_tree, is_preset, known_settings
from trainer.config.flat import flatten
from trainer.config.keys import leaf_keys, read
from trainer.config.recipe import Recipe
from trainer.config.schema import RunConfig
from trainer.config.settings import keys_set
from trainer.config.unused_keys import unused_reason
from trainer.launch import check, describe_plan, describe_saving, nominal_placement, trainer_class
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from trainer.ppo.sizes import batch_line
from trainer.ppo.stages import PPOTrainer
from trainer.recipe_command import run_command
from trainer.rows.config import RowConfig
from trainer.rows.trainer import RowTrainer
from trainer.run_folder.result import RunResult
from verl_like.errors import ConfigError, nearest
from verl_like.registry import load_object
from verl_like.terminal import printable

LEFT_OUT = ("resource_pool_spec", "role_mapping", "trainer.dry_run", "trainer.simulate")
"""Changed keys that are not listed: the placement shows them, or the command sets them."""
SET_HERE = ("trainer.dry_run", "trainer.simulate")
"""Keys of this command that the run does not take."""
CHOSEN = "Chosen for your settings and devices"


def explain(
    config: Any,
    measured: str = "",
    recipe: Recipe[Any] = PPO,
    settings: Sequence[str] = (),
) -> str:
    """Return all sections of the plan.

    `measured` is the folder of a run whose phases predict the time of an asynchronous run.
    `config` is the configuration of `recipe` with the user's `settings`.
    """
    known = known_settings(settings, recipe)
    unused: dict[str, list[str]] = {}
    for key in keys_set(known):
        reason = unused_reason(config, key)
        if reason:
            unused.setdefault(reason, []).append(key)
    trainer_cls, texts = trainer_class(config), []
    if isinstance(config, PPOConfig) and issubclass(trainer_cls, PPOTrainer):
        texts.append(batch_line(config))
        sections = ppo_sections(config, measured)
    else:
        sections = row_sections(config)
    sections["Changed from the defaults"] = change_lines(config, recipe, known)
    no_effect = [f"{', '.join(names)}: {why}" for why, names in unused.items()]
    sections["Keys that you set without effect"] = no_effect
    for title, lines in sections.items():
        if lines:
            texts.append("\n".join([title, "-" * len(title), *lines]))
    saving = describe_saving(config, trainer_cls)
    if saving:
        texts.append(saving)
    return "\n\n".join(texts)


def change_lines(config: RunConfig, recipe: Recipe[Any], settings: Sequence[Override]) -> list[str]:
    """Return the keys that differ from their defaults, with both values, grouped by their origin.

    Keys that the run does not read, and values that the recipe's own YAML sets, are left out.
    """
    presets = [setting for setting in settings if is_preset(setting, recipe)]
    ours: Recipe[Any] = load_object(RECIPES[recipe.name], recipe.name)
    keys_of_title = {"Set by you": {*keys_set(settings)}}
    for preset in presets:
        others = [setting for setting in presets if setting is not preset]
        changes = _values(recipe, presets) ^ _values(recipe, others)
        keys_of_title[f"Set by the preset {preset.input_line}"] = {key for key, _ in changes}
    changes = _values(recipe) ^ _values(ours)
    keys_of_title["Set by your YAML files"] = {key for key, _ in changes}

    default, composed = type(config)(), as_object(compose_tree(settings, recipe), recipe)
    lines: dict[str, list[str]] = {title: [] for title in (*keys_of_title, CHOSEN)}
    lines["Set by you"] = [f"  {preset.input_line} (preset)" for preset in presets]
    for key in (key.name for key in leaf_keys(type(config))):
        value, usual, before = (read(tree, key) for tree in (config, default, composed))
        if key in LEFT_OUT or unused_reason(config, key) is not None:
            continue
        titles = [
            title
            for title, keys in keys_of_title.items()
            if any(f"{name}.".startswith(f"{key}.") for name in keys)
        ]
        if key == "role_workers":  # only the user's classes
            users = keys_of_title["Set by you"]
            value = {role: cls for role, cls in value.items() if f"{key}.{role}" in users}
        elif not titles and _show(value) != _show(before):
            titles = [CHOSEN]
        if titles and _show(value) != _show(usual):
            lines[titles[0]].append(f"  {key}={_show(value)} (default {_show(usual)})")
    return [line for title, keys in lines.items() if keys for line in (f"{title}:", *keys)]


def _values(recipe: Recipe[Any], presets: Sequence[Override] = ()) -> set[tuple[str, str]]:
    """Return the keys and values of the recipe's YAML with these presets."""
    tree = OmegaConf.to_container(compose_tree(presets, recipe))
    return {(key, repr(value)) for key, value in flatten(tree).items()}


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        value = list(value)
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"


def main(arguments: Sequence[str]) -> None:
    """Check the run of these settings; an error ends the process with its message."""
    parser = argparse.ArgumentParser("verl-like check", add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus", default="")
    parser.add_argument("--device", default="")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--measured", default="")
    parser.add_argument("--rehearse", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    known_options = [f"--{option}" for option in vars(options)]
    for word in rest:
        hint = nearest(word, known_options) if word.startswith("--") else ""
        if hint:
            raise ConfigError(f"{word} is not an option.{hint}")
    name = "ppo"
    if rest and "=" not in rest[0] and not rest[0].startswith("-"):
        command = rest.pop(0)
        name, *preset = resolve_command(command) or [command]
        if name not in RECIPES:
            hint, known = nearest(command, RECIPES), ", ".join(RECIPES)
            raise ConfigError(f"check {command}: there is no such recipe.{hint} Known: {known}.")
        rest = [*preset, *rest]
    settings = [*rest, "trainer.dry_run=true"]
    if options.gpus.isdecimal() != bool(options.device):
        raise ConfigError("Write --gpus 8xH100, or --gpus 8 --device H100.")
    if options.gpus:
        gpus = f"{options.gpus}x{options.device}" if options.device else options.gpus
        settings.append(f"trainer.simulate={gpus}")
    if options.measured and name != "async":
        raise ConfigError(f"--measured={options.measured} works only with `verl-like check async`.")
    full = options.full or options.measured

    def start(config: RunConfig, recipe: Recipe[Any], settings: Sequence[str]) -> RunResult:
        """Check the configuration, rehearse if asked, and print the command of the run."""
        plan = partial(full_plan, measured=options.measured, recipe=recipe, settings=settings)
        result = check(config, plan=plan if full else None)
        if options.rehearse:
            from trainer.tools.rehearsal.rehearse import rehearse

            print("\nRehearsal: two steps, a resume and an export", flush=True)
            print("", *rehearse(config), "", sep="\n", flush=True)
        words = [word for word in rest if word.partition("=")[0] not in SET_HERE]
        if config.trainer.simulate is not None:
            keys, trainer = keys_set(known_settings(settings, recipe)), config.trainer
            sizes = {"nnodes": trainer.nnodes, "n_gpus_per_node": trainer.n_gpus_per_node}
            sizes = {f"trainer.{key}": n for key, n in sizes.items() if n > 1}
            words += [f"{key}={n}" for key, n in sizes.items() if key not in keys]
        command = " \\\n    ".join([f"verl-like {name}", *map(shlex.quote, words)])
        print(f"Next: start the run:\n  {command}", flush=True)
        return result

    run_command(load_object(RECIPES[name], name), settings, start=start)


def full_plan(
    config: RunConfig, measured: str = "", recipe: Recipe[Any] = PPO, settings: Sequence[str] = ()
) -> str:
    """Return the full plan of the run."""
    trainer_cls = trainer_class(config)
    is_ppo = isinstance(config, PPOConfig) and issubclass(trainer_cls, PPOTrainer)
    if is_ppo or (isinstance(config, RowConfig) and issubclass(trainer_cls, RowTrainer)):
        return printable(explain(config, measured, recipe, settings))
    return describe_plan(nominal_placement(config), config, trainer_cls, full=True)
