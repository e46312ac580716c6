r"""usage: verl-like plan [RECIPE] plan.gpus=16 plan.device=H100 [key=value ...]

Takes the same key=value settings as `verl-like RECIPE` (ppo, detached, sft, reward-model or dpo; by
default ppo) and says, from the model's config.json and data sheets alone, on which cards each role
should live: the best placements with the seconds of a step and the memory of every card, ready to
paste; why the others lose; how many cards are needed, and what more of them would bring. Keys that
you set keep their values, the others are searched: pools, parallel sizes, recomputation,
offloading, size of a pass, cards and memory of an engine, makers.

  plan.gpus=16             cards in all
  plan.device=H100         L4, L40S, A100, H20, H100, H200, B200, MI300X, or by numbers of its own:
                           plan.gib plan.flops plan.memory plan.link plan.network
  plan.per_node=8          cards of a machine
  plan.mean_prompt=200     tokens of a prompt; by default half of data.max_prompt_length
  plan.mean_response=400   tokens of a response; by default half of data.max_response_length
  plan.mean_length=300     tokens of a row of sft, reward-model or dpo; by default half of the most
  plan.lengths=FILE        tokens of responses or rows, as a JSON list, instead of a mean
  plan.html=FILE           writes the plan as a page, with figures of memory and of more cards
  plan.rewards=2.5         seconds of a step in which the driver scores
  plan.environment=8       seconds of a sample in which it waits for its environment
  plan.from_run=DIR        lengths, rewards and settings of a run, and its calls' own speed
  plan.calibration=FILE    a device as `--calibrate` has measured it elsewhere

  verl-like plan plan.gpus=16 plan.device=H100 actor_rollout_ref.model.path=y
  verl-like plan sft plan.gpus=8 plan.device=A100 model.path=y
  verl-like plan --calibrate [FILE]      measures this machine, in some minutes: its GPUs by their
                                         name, its cores as plan.device=cpu
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.cli.calibrate import calibrate, calibrated
from trainer.cli.main import RECIPES
from trainer.config import compose
from trainer.data.config import DataConfig
from trainer.planner.cost import POINTS, spread
from trainer.planner.devices import NUMBERS, Device, device_of
from trainer.planner.job import Job, cluster_keys, places_roles
from trainer.planner.layouts import PPOJob
from trainer.planner.measured import MeasuredRun, settings_of_run
from trainer.planner.search import Search
from trainer.planner.words import MOST_CARDS, Plan, compared
from trainer.rows.preflight import longest_row
from verl_like.errors import ConfigError, nearest
from verl_like.process.garbage import no_collection
from verl_like.process.machine import usable_cores
from verl_like.registry import load_object
from verl_like.terminal import terminal_width

JOBS = {
    "ppo": "trainer.planner.layouts.PPOJob",
    "detached": "trainer.detached.job.DetachedJob",
    "sft": "trainer.planner.rows.SFTJob",
    "reward-model": "trainer.planner.rows.RewardModelJob",
    "dpo": "trainer.planner.rows.PreferenceJob",
}
OTHER = {"ppo": "detached", "detached": "ppo"}
"""Recipes of which the keys of one are those of the other."""
ROW_RECIPES = tuple(recipe for recipe in JOBS if recipe not in OTHER)
ABBREVIATED = {"rm": "reward-model", "grpo": "ppo", "async": "detached"}
SECONDS = ("rewards", "environment")
FILES = ("device", "lengths", "from_run", "calibration", "html")
OF_PPO, OF_ROWS = ("mean_prompt", "mean_response", "from_run", *SECONDS), ("mean_length",)
"""Read of samples, and of rows."""
ASKED = ("gpus", "per_node", *NUMBERS, *dict.fromkeys((*FILES, *OF_PPO, *OF_ROWS)))


def main(arguments: Sequence[str]) -> None:
    """Print the plan."""
    logging.getLogger("trainer.config.compose").setLevel(logging.ERROR)  # dropped pools
    torch.set_num_threads(1)  # models are tried out at tiny sizes, where more threads cost time
    if "--calibrate" in arguments:
        files = [Path(each) for each in arguments if each != "--calibrate"]
        print(calibrate(job_of, files[0] if files else None))
    else:
        print(plan(arguments, terminal_width()))
        gc.freeze()  # the process ends: Python's last collection would take a second


@no_collection()
def plan(arguments: Sequence[str], max_columns: int | None = None) -> str:
    """The text for these arguments."""
    recipe, given = _recipe_of(arguments)
    asked, keys = _parsed(given, recipe)
    job = _job(recipe, asked, keys)
    found = Plan.of(job)
    if recipe in OTHER:
        found = replace(found, beside=_beside(job, recipe, asked, keys))
    text = found.text(max_columns)
    if "html" not in asked:
        return text
    from trainer.planner.page import write_page  # draws: its imports take a second

    return f"{text}\n\nAs a page: {write_page(found, Path(asked['html']))}"


def _recipe_of(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The recipe that is named first, and the rest."""
    first = arguments[0] if arguments else ""
    if not first or "=" in first:
        return "ppo", arguments
    known = ", ".join(JOBS)
    if first in JOBS:
        return first, arguments[1:]
    if first in RECIPES:
        raise ConfigError(
            f"plan {first}: it trains nothing, so no step is planned. Known: {known}."
        )
    hint = nearest(ABBREVIATED.get(first, first), JOBS)
    raise ConfigError(f"plan {first}: no such recipe.{hint} Known: {known}.")


def _beside(job: Job, recipe: str, asked: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The line that compares with the other recipe of PPO."""
    other = OTHER[recipe]
    common = [key for key in keys if not key.startswith("detached.") and not places_roles(key)]
    try:
        return compared(job, _job(other, asked, common, job.device, job.search))
    except ConfigError as error:
        return f"As `verl-like {other}` it cannot run: {error}"


def job_of(arguments: Sequence[str], device: Device | None = None) -> PPOJob:
    """A run of PPO's on `device`, or on the one that the arguments name."""
    asked, keys = _parsed(arguments, "ppo")
    job = _job("ppo", asked, keys, device)
    assert isinstance(job, PPOJob), "that recipe's"
    return job


def _job(
    recipe: str,
    asked: Mapping[str, Any],
    keys: Sequence[str],
    device: Device | None = None,
    known: Search | None = None,
) -> Job:
    """What is planned; with what is known of the same roles."""
    if not any(key.startswith("data.train_files=") for key in keys):
        keys = [*keys, "data.train_files=rows.parquet"]  # which nobody opens here
    device = device or _device(asked)
    num_cards = asked["gpus"]
    per_node = asked.get("per_node", usable_cores() if device.type == "cpu" else 8)
    if num_cards > per_node and num_cards % per_node:
        below = num_cards - num_cards % per_node
        raise ConfigError(
            f"plan.gpus={num_cards} are no whole machines of plan.per_node={per_node}: give "
            f"{below} or {below + per_node}."
        )
    run = MeasuredRun.of(asked["from_run"]) if "from_run" in asked else None
    defaults = settings_of_run(run.folder) if run else []
    cluster = cluster_keys(device, num_cards, per_node)
    cls = load_object(JOBS[recipe], "plan")
    config = compose.load_config([*keys, *cluster], cls.recipe, defaults)
    common = {
        "config": config,
        "settings": keys,
        "device": device,
        "num_cards": num_cards,
        "per_node": per_node,
        "defaults": defaults,
        "known": known,
    }
    if not issubclass(cls, PPOJob):
        job: Job = cls(**common, lengths=_lengths_of_rows(asked, longest_row(config)))
        job.check()
        return job
    mean_prompt, responses = _lengths(asked, config.data, run)
    rewards = asked.get("rewards", run.rewards if run else 0.0)
    waits = asked.get("environment", 0.0)
    times = {"waits": waits, "rewards": rewards}
    own: PPOJob = cls(**common, mean_prompt=mean_prompt, responses=responses, **times)
    if known is None:
        own.check()
    return replace(own, factors=run.factors(own)) if run else own


def _device(asked: Mapping[str, Any]) -> Device:
    own = {name: asked[name] for name in NUMBERS if name in asked}
    measured = calibrated(asked["device"], asked.get("calibration"))
    return replace(measured, **own) if measured else device_of(asked["device"], own)


def _lengths(
    asked: Mapping[str, Any], data: DataConfig, run: MeasuredRun | None
) -> tuple[float, Sequence[float]]:
    """Mean tokens of a prompt, and those of responses that are equally likely."""
    found = {"prompt": data.max_prompt_length / 2, "response": data.max_response_length / 2}
    if run is not None:
        found = {"prompt": run.prompt, "response": run.response}
    for part in found:
        most = getattr(data, f"max_{part}_length")
        found[part] = asked.get(f"mean_{part}", found[part])
        if found[part] > most:
            raise ConfigError(
                f"plan.mean_{part}={found[part]:g} is above data.max_{part}_length={most}."
            )
    if "lengths" not in asked:
        return found["prompt"], spread(found["response"], data.max_response_length)
    if "mean_response" in asked:
        raise ConfigError("plan.lengths and plan.mean_response say the same twice: drop one.")
    responses = read_lengths(asked["lengths"])
    if responses[-1] > (most := data.max_response_length):
        raise ConfigError(
            f"plan.lengths={asked['lengths']} has a response of {responses[-1]:,.0f} tokens, above "
            f"data.max_response_length={most:,}."
        )
    return found["prompt"], responses


def _lengths_of_rows(asked: Mapping[str, Any], most: int) -> Sequence[float]:
    """Tokens of rows that are equally likely."""
    if "lengths" in asked and "mean_length" in asked:
        raise ConfigError("plan.lengths and plan.mean_length say the same twice: drop one.")
    lengths = read_lengths(asked["lengths"]) if "lengths" in asked else ()
    mean = asked.get("mean_length", most / 2)
    if lengths:  # longer rows are cut
        return [min(each, most) for each in lengths]
    if mean > most:
        raise ConfigError(f"plan.mean_length={mean:g} is above the longest row, {most} tokens.")
    return spread(mean, most)


def read_lengths(path: str) -> Sequence[float]:
    """The lengths in a JSON list, by as many equally likely ones as the planner counts with."""
    try:
        found = np.array(json.loads(Path(path).read_text(encoding="utf-8")), dtype=float)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"plan.lengths={path} is no JSON list of lengths: {error}.") from error
    if found.ndim != 1 or not found.size or not (found > 0).all():
        raise ConfigError(f"plan.lengths={path}: give a list of lengths in tokens, above 0.")
    middles = (np.arange(POINTS) + 0.5) / POINTS
    return [*map(float, np.quantile(found, middles[:-1])), float(found.max())]


def _parsed(arguments: Sequence[str], recipe: str) -> tuple[dict[str, Any], list[str]]:
    """What is asked of the plan, and the keys of the run."""
    asked: dict[str, Any] = {}
    keys = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if not name.startswith("plan."):
            keys.append(argument)
            continue
        short = name.removeprefix("plan.")
        if short not in ASKED:
            known = ", ".join(f"plan.{each}" for each in ASKED)
            raise ConfigError(f"{name} is no key.{nearest(short, ASKED)} Known: {known}.")
        if short in (OF_PPO if recipe in ROW_RECIPES else OF_ROWS):
            read_by = ", ".join(ROW_RECIPES if short in OF_ROWS else OTHER)
            raise ConfigError(f"{name} says nothing of {recipe}: it is read by {read_by}.")
        asked[short] = value if short in FILES else _number(name, value)
    for name in ("gpus", "device"):
        if name not in asked:
            raise ConfigError(f"plan.{name} is missing, as in plan.gpus=16 plan.device=H100.")
    return asked, keys


def _number(name: str, value: str) -> float:
    counts = name in ("plan.gpus", "plan.per_node")
    try:
        found = int(value) if counts else float(value)
    except ValueError:
        found = 0
    if found <= 0 or (counts and found > MOST_CARDS):
        limit = f"from 1 to {MOST_CARDS:,}" if counts else "above 0"
        raise ConfigError(f"{name}={value}: give a number {limit}.")
    return found
