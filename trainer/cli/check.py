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
                       with a tiny model of your model's class; your reward
                       functions score all rows, for at most 30 s; it writes
                       only into a temporary folder
"""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from trainer.async_training.checks import plan_lines
from trainer.async_training.config import AsyncConfig
from trainer.cli.main import RECIPES, resolve_command
from trainer.config.compose import as_object, compose_tree, is_preset, known_settings
from trainer.config.devices import run_devices
from trainer.config.keys import flatten, leaf_keys, value_at
from trainer.config.schema import Recipe, RunConfig
from trainer.config.settings import keys_set
from trainer.config.unused_keys import unused_reason
from trainer.launch import check, describe_plan, describe_saving, nominal_placement, trainer_class
from trainer.memory import describe_axes, role_models
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe
from trainer.ppo.memory import batch_line, batch_table, fit_passes, plan_text
from trainer.ppo.recipe import PPO
from trainer.ppo.roles import declared_models
from trainer.ppo.stages import PPOTrainer
from trainer.recipe_command import run_command
from trainer.rows.config import RowConfig
from trainer.rows.trainer import RowTrainer, step_sizes
from trainer.rows.trainer import plan_text as row_plan_text
from trainer.run_folder.result import RunResult
from trainer.stubs import trace_step
from trainer.tools.report.read import read_run
from verl_like.errors import ConfigError, nearest
from verl_like.placement.pools import expand_roles
from verl_like.registry import load_object
from verl_like.terminal import printable
from workers.losses.registry import POLICY_LOSSES

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
        value, usual, before = (value_at(tree, key) for tree in (config, default, composed))
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
            from trainer.tools.rehearsal import rehearse

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


def ppo_sections(config: PPOConfig, measured: str) -> dict[str, list[str]]:
    """Return the sections about memory, placement and calls of PPO and its variants."""
    config = fit_passes(config, run_devices(config.trainer))
    nodes, problem = trace_step(config)
    return {
        "Memory per device": plan_text(config, heading="").splitlines(),
        "Placement": placement_lines(config),
        **generators_sections(config, measured),
        "Calls of a step": describe(config, nodes, problem).splitlines(),
        "Batch sizes": batch_table(config, nodes).splitlines(),
        "Metrics to watch": watch_lines(config),
    }


def row_sections(config: RowConfig) -> dict[str, list[str]]:
    """Return the sections about memory, placement and batch sizes of a recipe on rows."""
    memory = row_plan_text(config, heading="")
    axes = describe_axes(config, role_models(config))
    placement = nominal_placement(config).draw(axes)
    return {
        "Memory per device": memory.splitlines(),
        "Placement": placement.splitlines(),
        "Batch sizes": [step_sizes(config)],
    }


def generators_sections(config: PPOConfig, measured: str) -> dict[str, list[str]]:
    """Describe an asynchronous run: its generators, its trainers and, if known, its speed."""
    if not isinstance(config, AsyncConfig):
        return {}
    speed = ["Add --measured RUN_DIR, the folder of a PPO run, to compare the seconds of both."]
    if measured:
        speed = measured_sides(measured, config.topology.generators)
    return {"Generators and trainers": plan_lines(config), "Speed": speed}


def measured_sides(folder: str, num_generators: int) -> list[str]:
    """Compare the seconds of generation and training that a run measured.

    The first step is left out if there are others, because caches and compilers warm up in it.
    """
    data = read_run(folder)
    timed = [line for line in data.metrics if line.get("timing_s/sample", 0.0) > 0.0]
    if not timed or any(name.startswith("async/") for name in timed[0]):
        raise ConfigError(
            f"{folder}/metrics.jsonl has no timing_s/sample of a synchronous run, so the time of "
            "generation is unknown. Pass the folder of a PPO run."
        )
    timed = timed[1:] or timed
    sample, sync, step = (
        sum(line.get(f"timing_s/{name}", 0.0) for line in timed) / len(timed)
        for name in ("sample", "sync", "step")
    )
    training = step - sample - sync
    slower = max(sample / num_generators + sync, training)
    lines = [
        f"Measured in steps {timed[0]['step']:.0f} to {timed[-1]['step']:.0f} of {folder}: "
        f"generation {sample:.3g} s, weight sync {sync:.3g} s, scores and updates {training:.3g} s",
        f"Generation takes {sample / training:.2g} times as long as scores and updates.",
        f"With async_training.generators={num_generators}, a step takes about {slower:.3g} s, if "
        "each generator and the trainer have as many devices as the run; synchronously, it takes "
        f"{step:.3g} s.",
    ]
    generated, trained = (
        {call.pool for call in data.calls if call.method in methods}
        for methods in (("generate_sequences", "collect"), ("update_actor",))
    )
    if generated & trained:
        lines.append(
            "In this run, generation and training share devices. If you split the same devices in "
            "half, both take about twice as long."
        )
    return lines


def placement_lines(config: PPOConfig) -> list[str]:
    """Describe the placement on the configured nodes, and its consequences."""
    axes = describe_axes(config, declared_models(config, without_users=True))
    lines = nominal_placement(config).draw(axes).splitlines()
    pools = config.resource_pool_spec
    if len(pools) > 1 and all(config.is_inline(name, sum(pools[name])) for name in pools):
        lines.append(
            "All pools run in the driver's process, so calls run sequentially. Set "
            "trainer.backend=ray, or use two processes per pool, to let them overlap."
        )
    elif len(pools) == 1 and "critic" in expand_roles(config.role_mapping):
        if run_devices(config.trainer).type == "cpu" or sum(map(sum, pools.values())) > 1:
            lines.append("Set placement=split for a separate pool for the critic.")
    return lines


def watch_lines(config: PPOConfig) -> list[str]:
    """Return the metrics to watch for the run's estimator and loss, unless they are user code."""
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    chosen: dict[str, Callable[..., Any] | None] = {}
    if unused_reason(config, "algorithm.adv_estimator") is None:
        name = config.algorithm.adv_estimator
        chosen[f"advantage estimator {name}"] = ADVANTAGE_ESTIMATORS.get(name)
    chosen[f"policy loss {loss_mode}"] = POLICY_LOSSES.get(loss_mode)
    watched = {name: doc_parts(entry)[1] for name, entry in chosen.items() if entry is not None}
    return [f"{name}: {_with_full_keys(text, config)}" for name, text in watched.items()]


def _with_full_keys(text: str, config: PPOConfig) -> str:
    """Return the text on one line, with full names of keys such as `clip_ratio_high`."""
    keys = [key.name for key in leaf_keys(type(config))]

    def full(short: re.Match[str]) -> str:
        names = [key for key in keys if f".{key}".endswith(f".{short[1]}")]
        return f"`{names[0]}`" if len(names) == 1 else short[0]

    return re.sub(r"`([\w.]+)`", full, " ".join(text.split()))


def doc_parts(algorithm: Callable[..., Any]) -> tuple[str, str, str]:
    """Return formula, metrics to watch and source from a docstring; "" for a missing one."""
    formula, fields = [], {"Watch": "", "Source": ""}
    for paragraph in inspect.cleandoc(algorithm.__doc__ or "").split("\n\n"):
        label, colon, text = paragraph.partition(": ")
        if colon and label in fields:
            fields[label] = text
        elif not paragraph.startswith("Args:\n"):
            formula.append(paragraph)
    return "\n\n".join(formula), fields["Watch"], fields["Source"]
