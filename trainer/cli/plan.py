r"""usage: verl-like plan [RECIPE] --gpus 16 --device H100 [key=value ...]

Proposes on which GPUs each role should run:

  verl-like plan --gpus 16 --device H100 actor_rollout_ref.model.path=y
  verl-like plan sft --gpus 8 --device A100 model.path=y

It reads only the model's config.json and the GPUs' data sheets, and needs no
GPU. It takes the settings of `verl-like RECIPE` (ppo, async, sft, reward-model
or dpo; by default ppo) and prints up to five placements that fit (for a single
model, its layouts), the fastest first, with their seconds per step and memory,
what limits each, and a command with the keys of the fastest one. Keys that
you set keep their values. The plan chooses the others: pools, parallel sizes,
gradient checkpointing, offloading, tokens per pass, GPUs per engine, and
generators.

  --gpus 16             GPUs in all; --gpus 16xH100 includes the device
  --device H100         L4, L40S, A100, H20, H100, H200, B200, MI300X, or
                        another name with --memory-gib, --flops (per s), and
                        --memory-bandwidth, --link-bandwidth,
                        --network-bandwidth (bytes per s)
  --per-node 8          GPUs per node; default: 8
  --mean-prompt 200     tokens per prompt; default: half of
                        data.max_prompt_length
  --mean-response 400   tokens per response; default: half of
                        data.max_response_length
  --mean-length 300     tokens per row of sft, reward-model or dpo; default:
                        half of data.max_length, or of the model's limit
  --lengths FILE        tokens of responses or rows, as a JSON list, instead of
                        a mean
  --reward-s 2.5        seconds per step that reward functions take
  --environment-s 8     seconds per sample that the environment takes
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.cli.main import RECIPES, resolve_command
from trainer.config import compose
from trainer.config.devices import GPUS_PER_NODE
from trainer.config.settings import overrides_of
from trainer.rows.trainer import longest_row
from trainer.tools.planner.cost import NUMBERS, POINTS, assumed_lengths, device_of
from trainer.tools.planner.job import Job, cluster_keys
from trainer.tools.planner.ppo import PPOJob
from trainer.tools.planner.text import MAX_GPUS, NO_FILES, plan_text
from verl_like.errors import ConfigError, nearest
from verl_like.files import parse_json
from verl_like.process.garbage import pause_collection
from verl_like.registry import load_object

JOBS = {
    "ppo": "trainer.tools.planner.ppo.PPOJob",
    "async": "trainer.tools.planner.async_training.AsyncJob",
    **dict.fromkeys(("sft", "reward-model", "dpo"), "trainer.tools.planner.job.RowsJob"),
}
SAMPLING = ("ppo", "async")
"""Recipes that plan samples; the others plan rows of a file."""
TEXTS = ("device", "lengths")
PPO_OPTIONS = ("mean_prompt", "mean_response", "reward_s", "environment_s")
ROW_OPTIONS = ("mean_length",)
OPTIONS = ("gpus", "per_node", *NUMBERS, "device", "lengths", *PPO_OPTIONS, *ROW_OPTIONS)


def main(arguments: Sequence[str]) -> None:
    """Print the plan."""
    logging.getLogger("trainer.config.compose").addFilter(
        lambda record: not record.getMessage().startswith("note: ")  # such as about dropped pools
    )
    torch.set_num_threads(1)  # models are tried out at tiny sizes, where more threads cost time
    print(plan(arguments))
    gc.freeze()  # the process ends: Python's last collection would take a second


@pause_collection()
def plan(arguments: Sequence[str]) -> str:
    """Return the plan for these arguments."""
    return plan_text(job_of(arguments))


def _recipe_of(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the recipe, which an argument may name, and the other arguments."""
    named = (word for word in arguments if word in RECIPES or resolve_command(word))
    word = next(named, arguments[0] if arguments else "")
    if not word or "=" in word or word.startswith("-"):
        return "ppo", arguments
    name, *preset = resolve_command(word) or [word]
    known = ", ".join(JOBS)
    if name in JOBS:
        return name, [*preset, *(other for other in arguments if other != word)]
    raise ConfigError(f"plan {word}: there is no such recipe.{nearest(word, JOBS)} Known: {known}.")


def job_of(arguments: Sequence[str]) -> Job:
    """Return the checked job for these arguments."""
    recipe, rest = _recipe_of(arguments)
    options, keys = _parse(rest, recipe)
    if not any(key.startswith("data.train_files=") for key in keys):
        keys = [*keys, NO_FILES]
    numbers = {name: options[name] for name in NUMBERS if name in options}
    device = device_of(options["device"], numbers)
    num_gpus, per_node = options["gpus"], options.get("per_node", GPUS_PER_NODE)
    if num_gpus > per_node and num_gpus % per_node:
        below = num_gpus - num_gpus % per_node
        raise ConfigError(
            f"--gpus={num_gpus} does not fill whole nodes of --per-node={per_node}. Use {below} "
            f"or {below + per_node}."
        )
    cls, program = load_object(JOBS[recipe], "plan"), load_object(RECIPES[recipe], "plan")
    cluster = cluster_keys(device, num_gpus, per_node)
    config = compose.load_config([*keys, *overrides_of(cluster)], program)
    workload: dict[str, Any] = {}
    if not issubclass(cls, PPOJob):
        workload["lengths"] = _lengths(options, "length", "the longest row", longest_row(config))
    else:
        longest = config.data.max_prompt_length
        workload["mean_prompt"] = _mean(options, "prompt", "data.max_prompt_length", longest)
        longest = config.data.max_response_length
        workload["responses"] = _lengths(options, "response", "data.max_response_length", longest)
        workload["waits"] = options.get("environment_s", 0.0)
        workload["rewards"] = options.get("reward_s", 0.0)
    job: Job = cls(
        recipe=program,
        config=config,
        settings=keys,
        device=device,
        num_gpus=num_gpus,
        per_node=per_node,
        **workload,
    )
    job.check()
    return job


def _lengths(options: Mapping[str, Any], part: str, limit_key: str, most: int) -> Sequence[float]:
    """Return equally likely lengths of responses or rows, from a file or from their mean."""
    if "lengths" not in options:
        return assumed_lengths(_mean(options, part, limit_key, most), most)
    if f"mean_{part}" in options:
        raise ConfigError(f"--lengths and --mean-{part} set the same lengths. Use only one.")
    lengths = read_lengths(options["lengths"])
    if part == "length":  # longer rows are cut
        return [min(length, most) for length in lengths]
    if lengths[-1] > most:
        raise ConfigError(
            f"--lengths={options['lengths']} has a response of {lengths[-1]:,.0f} tokens, above "
            f"{limit_key}={most:,}."
        )
    return lengths


def _mean(options: Mapping[str, Any], part: str, limit_key: str, most: int) -> float:
    """Return the mean number of tokens of prompts, responses or rows."""
    name = f"mean_{part}"
    mean: float = options.get(name, most / 2)
    if mean > most:
        raise ConfigError(f"--mean-{part}={mean:g} is above {limit_key}={most}.")
    return mean


def read_lengths(path: str) -> Sequence[float]:
    """Return quantiles of the lengths in a JSON list, which represent all of them."""
    file = Path(path)
    if file.exists() and not file.is_file():
        raise ConfigError(f"--lengths={path} is not a regular file.")
    try:
        lengths = np.array(parse_json(file.read_text(encoding="utf-8")), dtype=float)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--lengths={path} is not a JSON list of lengths: {error}.") from error
    is_list = lengths.ndim == 1 and lengths.size
    if not is_list or not (np.isfinite(lengths) & (lengths > 0)).all():
        raise ConfigError(f"--lengths={path}: write a list of lengths in tokens, above 0.")
    middles = (np.arange(POINTS) + 0.5) / POINTS
    return [*map(float, np.quantile(lengths, middles[:-1])), float(lengths.max())]


def _parse(arguments: Sequence[str], recipe: str) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the plan, and the keys of the run."""
    options: dict[str, Any] = {}
    keys = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            keys.append(argument)
            continue
        name, equals, value = argument.partition("=")
        option = name.removeprefix("--").replace("-", "_")
        if option not in OPTIONS:
            known = [f"--{known_option}".replace("_", "-") for known_option in OPTIONS]
            raise ConfigError(
                f"{name} is not an option.{nearest(name, known)} Known: {', '.join(known)}."
            )
        if not equals:
            value = next(rest, "")
        if option in (ROW_OPTIONS if recipe in SAMPLING else PPO_OPTIONS):
            readers = [job for job in JOBS if (job in SAMPLING) != (recipe in SAMPLING)]
            raise ConfigError(
                f"{name} does not apply to {recipe}; only {', '.join(readers)} use it."
            )
        count, x, kind = value.partition("x")
        if option == "gpus" and count and x:
            value, options["device"] = count, kind
        options[option] = value if option in TEXTS else _number(name, value)
    for option in ("gpus", "device"):
        if option not in options:
            raise ConfigError(
                f"--{option} is missing. Set the number and the GPU, as in --gpus 16xH100."
            )
    return options, keys


def _number(name: str, value: str) -> float:
    is_count = name in ("--gpus", "--per-node")
    try:
        number = int(value) if is_count else float(value)
    except ValueError:
        number = 0
    if number <= 0 or (is_count and number > MAX_GPUS):
        limit = f"from 1 to {MAX_GPUS:,}" if is_count else "above 0"
        raise ConfigError(f"{name}={value}: use a number {limit}.")
    return number
