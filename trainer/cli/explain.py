r"""usage: verl-like explain [key=value ...]
       verl-like explain async [--measured=RUN_DIR] [key=value ...]

Takes the same key=value settings as `verl-like ppo` and prints, without starting a process: the
calls of a step with what each waits for, which run at the same time, who runs where, every batch
size with its unit, each key that is not at its default with its meaning, and the keys that have no
effect in this run. Memory of every role is that of this machine's devices, or of those that
trainer.simulate=8xH100 names.

Of an asynchronous run also who makes and who trains, how far generators run ahead, and, from the
seconds of the PPO run in RUN_DIR, how long a step will take and what limits it.

  verl-like explain placement=split trainer.n_gpus_per_node=8 \
      data.train_files=x actor_rollout_ref.model.path=y
"""

from __future__ import annotations

import argparse
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from trainer.async_training.config import AsyncConfig
from trainer.async_training.plan import plan_lines
from trainer.async_training.recipe import ASYNC
from trainer.config.devices import devices_of
from trainer.config.keys import field_docs, leaf_keys, read
from trainer.config.recipe import Recipe
from trainer.config.unused_keys import unused_keys, why_unused
from trainer.launch import nominal_placement, trainer_class
from trainer.memory import axes_in_words
from trainer.planner.prediction import measured_phases, prediction_line
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe, own_stages
from trainer.ppo.memory import fit_passes, plan_text
from trainer.ppo.recipe import PPO, load_config
from trainer.ppo.roles import models_of
from trainer.ppo.sizes import batch_table
from trainer.ppo.stages import PPOTrainer
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from verl_like.terminal import fit, terminal_width
from workers.losses.registry import POLICY_LOSSES

SHOWN_AS_PLACEMENT = ("resource_pool_spec", "role_mapping")
WIDTH_OF_A_FILE = 160


def explain(
    config: PPOConfig,
    max_columns: int | None = None,
    measured: str = "",
) -> str:
    """Return all sections, with tables no wider than `max_columns`.

    `measured` is the folder of a run whose phases predict the time of an asynchronous run.
    """
    config = fit_passes(config, devices_of(config.trainer))
    trainer_cls = trainer_class(config)
    assert issubclass(trainer_cls, PPOTrainer), "only PPO and its variants are explained"
    own = own_stages(trainer_cls)
    sections = {
        "What a step does": describe(config, max_columns, own).splitlines(),
        **generators_sections(config, max_columns, measured),
        "Who runs where": placement_lines(config, max_columns),
        "How much": batch_table(config, max_columns).splitlines(),
        "On a device": plan_text(config, max_columns).splitlines(),
        "What to watch": watch_lines(config),
        "Changed from the defaults": change_lines(config),
        "No effect in this run": [
            f"{', '.join(keys)}: {reason}" for reason, keys in unused_keys(config).items()
        ],
    }
    return "\n\n".join(
        "\n".join([title, "-" * len(title), *(lines or ["nothing"])])
        for title, lines in sections.items()
    )


def generators_sections(
    config: PPOConfig, max_columns: int | None, measured: str
) -> dict[str, list[str]]:
    """Return the generators, trainers and, if known, speed of an asynchronous run."""
    if not isinstance(config, AsyncConfig):
        return {}
    if not measured:
        ask = "verl-like explain async --measured=RUN_DIR ...: from the seconds of any PPO run"
        return {"Generators and trainers": plan_lines(config, max_columns), "How fast": [ask]}
    phases, notes = measured_phases(measured)
    fast = [prediction_line(config, phases), *notes]
    return {"Generators and trainers": plan_lines(config, max_columns), "How fast": fast}


def placement_lines(config: PPOConfig, max_columns: int | None = None) -> list[str]:
    """Describe the placement on the configured nodes, and its consequences."""
    num_roles = Counter(expand_roles(config.role_mapping).values())
    shared = [pool for pool, count in num_roles.items() if count > 1]

    axes = axes_in_words(config, models_of(config, without_users=True))
    lines = nominal_placement(config).draw(max_columns, axes).splitlines()
    pools = config.resource_pool_spec.items()
    if len(pools) > 1 and all(config.is_inline(name, sum(sizes)) for name, sizes in pools):
        lines.append(
            "all pools are the driver's own process, so calls run in turns: trainer.backend=ray, "
            "or two processes a pool, lets them overlap"
        )
    elif len(pools) > 1:
        lines.append("calls on different pools run at the same time")
    else:
        lines.append(
            "there is one pool, so nothing overlaps but rewards: placement=split gives the "
            "critic its own"
        )
    return lines + [f"roles on {pool} share its processes and take turns" for pool in shared]


def watch_lines(config: PPOConfig) -> list[str]:
    """Return the metrics that show whether estimator and policy loss do well; not for user code."""
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    chosen: dict[str, Callable[..., Any] | None] = {}
    if why_unused(config, "algorithm.adv_estimator") is None:
        name = config.algorithm.adv_estimator
        chosen[name] = ADVANTAGE_ESTIMATORS.get(name)
    chosen[loss_mode] = POLICY_LOSSES.get(loss_mode)
    watched = {name: said_of(entry)[1] for name, entry in chosen.items() if entry is not None}
    return [f"{name}: {' '.join(text.split())}" for name, text in watched.items()]


def said_of(algorithm: Callable[..., Any]) -> tuple[str, str, str]:
    """Return (formula, what to watch, source) from an algorithm's docstring, "" if missing."""
    formula, said = [], {"Watch": "", "Source": ""}
    for paragraph in inspect.cleandoc(algorithm.__doc__ or "").split("\n\n"):
        label, colon, text = paragraph.partition(": ")
        if colon and label in said:
            said[label] = text
        else:
            formula.append(paragraph)
    return "\n\n".join(formula), said["Watch"], said["Source"]


def change_lines(config: PPOConfig) -> list[str]:
    """Return key, value, default and meaning of every key that is not at its default."""
    schema: type = type(config)
    default, docs = schema(), field_docs(schema)
    lines = []
    for key in (key.name for key in leaf_keys(schema)):
        if key in SHOWN_AS_PLACEMENT:
            continue
        value, usual = (
            list(v) if isinstance(v, tuple) else v for v in (read(config, key), read(default, key))
        )
        if value != usual:
            meaning = " ".join(docs[key].split())  # the field's docstring may have several lines
            lines.append(f"{key}={_show(value)} (default {_show(usual)}): {meaning}")
    return lines


def _show(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"


def main(arguments: Sequence[str]) -> None:
    """Print the explanation, wrapped to the terminal."""
    parser = argparse.ArgumentParser("verl-like explain", add_help=False, allow_abbrev=False)
    parser.add_argument("--measured", default="")
    options, settings = parser.parse_known_args(arguments)
    if unknown := [option for option in settings if option.startswith("-")]:
        raise ConfigError(f"there is no option {unknown[0]}, only --measured=RUN_DIR.")
    is_async = settings[:1] == ["async"]
    recipe: Recipe[Any] = ASYNC if is_async else PPO
    config = load_config(settings[is_async:], recipe)
    if options.measured and not is_async:
        raise ConfigError(
            f"--measured={options.measured} tells of a run of `explain async ...` alone."
        )
    width = terminal_width() or WIDTH_OF_A_FILE
    print(fit(explain(config, width, options.measured), width))
