r"""usage: verl-like plan plan.gpus=16 plan.device=H100 [key=value ...]

Takes the same key=value settings as `verl-like ppo` and says, from the model's config.json and data
sheets alone, on which cards each role should live: the best placements with the seconds of a step
and the memory of every card, ready to paste; why the others lose; how many cards are needed, and
what more of them would bring. Keys that you set keep their values, the others are searched: pools,
parallel sizes, recomputation, offloading, tokens of a pass, cards and memory of an engine.

  plan.gpus=16             cards in all
  plan.device=H100         L4, L40S, A100, H20, H100, H200, B200, MI300X, or by numbers of its own:
                           plan.gib plan.flops plan.memory plan.link plan.network
  plan.per_node=8          cards of a machine
  plan.mean_prompt=200     tokens of a prompt; by default half of data.max_prompt_length
  plan.mean_response=400   tokens of a response; by default half of data.max_response_length
  plan.lengths=FILE        responses' lengths in tokens, as a JSON list, instead of a mean
  plan.rewards=2.5         seconds of a step in which the driver scores
  plan.environment=8       seconds of a sample in which it waits for its environment
  plan.from_run=DIR        lengths, rewards and settings of a run, and its calls' own speed
  plan.calibration=FILE    a device as `--calibrate` has measured it elsewhere

  verl-like plan plan.gpus=16 plan.device=H100 actor_rollout_ref.model.path=y
  verl-like plan --calibrate [FILE]      measures this machine, in some minutes: its GPUs by their
                                         name, its cores as plan.device=cpu
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.cli.calibrate import calibrate, calibrated
from trainer.config import compose
from trainer.config.devices import devices_of
from trainer.data.config import DataConfig
from trainer.launch import nominal_placement
from trainer.planner.cost import POINTS, spread
from trainer.planner.devices import NUMBERS, Device, device_of
from trainer.planner.layouts import STAGES, Job
from trainer.planner.measured import MeasuredRun, settings_of_run
from trainer.planner.search import Placement, Pool, Search
from trainer.ppo.memory import check_memory
from trainer.ppo.recipe import PPO
from verl_like.errors import ConfigError, PlacementError, nearest
from verl_like.process.machine import usable_cores
from verl_like.terminal import draw_table, terminal_width
from workers.memory import GIB

SHOWN = 5
MOST_CARDS = 4096
SECONDS = ("rewards", "environment")
FILES = ("device", "lengths", "from_run", "calibration")
LENGTHS = ("mean_prompt", "mean_response")
ASKED = ("gpus", "per_node", *FILES, *LENGTHS, *SECONDS, *NUMBERS)


def main(arguments: Sequence[str]) -> None:
    """Print the plan."""
    logging.getLogger("trainer.config.compose").setLevel(logging.ERROR)  # dropped pools
    torch.set_num_threads(1)  # models are tried out at tiny sizes, where more threads cost time
    if "--calibrate" in arguments:
        files = [Path(each) for each in arguments if each != "--calibrate"]
        print(calibrate(job_of, files[0] if files else None))
    else:
        print(plan(arguments, terminal_width()))


def plan(arguments: Sequence[str], max_columns: int | None = None) -> str:
    """The text for these arguments."""
    job = job_of(arguments)
    search = Search(job.roles, job.options, job.device.bytes, job.least)
    found = search.best(sizes_of(job.num_cards, job.per_node), job.num_cards, SHOWN)
    if not found:
        raise _fits_nowhere(job, search)
    best, refused = sifted(job, found)
    if not best:
        raise ConfigError(f"No placement is valid. The fastest by numbers: {refused[0]}")
    return "\n\n".join(
        [
            head(job),
            _table(best, max_columns),
            _as_keys(job, best[0]),
            _losers(found, best),
            *(["Refused as a run would refuse it:\n" + "\n".join(refused)] if refused else []),
            _curve(job, search),
        ]
    )


def sifted(job: Job, found: Sequence[Placement]) -> tuple[list[Placement], list[str]]:
    """The fastest that a run would begin with, and why it would refuse faster ones."""
    best: list[Placement] = []
    refused = []
    for placement in found:
        error = why_refused(job, placement)
        if error is None:
            best.append(placement)
        else:
            refused.append(f"  {in_words(placement)}: {error}")
        if len(best) == SHOWN:
            break
    return best, refused


def job_of(arguments: Sequence[str], device: Device | None = None) -> Job:
    """What is planned; on `device`, or on the one that the arguments name."""
    asked, keys = _parsed(arguments)
    if not any(key.startswith("data.train_files=") for key in keys):
        keys.append("data.train_files=prompts.parquet")  # which nobody opens here
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
    config = compose.load_config([*keys, *cluster], PPO, defaults)
    mean_prompt, responses = _lengths(asked, config.data, run)
    job = Job(
        config,
        keys,
        device,
        num_cards,
        per_node,
        mean_prompt,
        responses,
        defaults=defaults,
        waits=asked.get("environment", 0.0),
        rewards=asked.get("rewards", run.rewards if run else 0.0),
    )
    job.check()
    return replace(job, factors=run.factors(job)) if run else job


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


def _parsed(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
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


def cluster_keys(device: Device, num_cards: int, per_node: int) -> list[str]:
    """Overrides that plan with so many of the cards."""
    on_node = min(num_cards, per_node)
    what = f"trainer.pretend={on_node}x{device.gib:g}GiB"
    return [
        "trainer.device=cpu" if device.type == "cpu" else what,
        f"trainer.nnodes={num_cards // on_node}",
        f"trainer.n_gpus_per_node={on_node}",
    ]


def sizes_of(num_cards: int, per_node: int) -> list[int]:
    """Sizes of pools that are tried: powers of two in a machine, and whole machines."""
    nodes = num_cards // per_node
    numbers = [n for n in range(1, nodes + 1) if nodes <= 8 or n == nodes or _few_factors(n)]
    in_node = [n for n in (1, 2, 4, 8, 16) if n <= min(num_cards, per_node)]
    return sorted({*in_node, min(num_cards, per_node), *(per_node * n for n in numbers)})


def _few_factors(number: int) -> bool:
    """Whether it is a power of two, or three of one."""
    while number % 2 == 0:
        number //= 2
    return number in (1, 3)


def overrides_of(placement: Placement, job: Job) -> list[str]:
    """The keys that place and lay out the roles so."""
    if len(placement.pools) == 1:
        found = ["placement=colocate"]
    else:
        found = []
        for pool in placement.pools:
            name = f"{pool.roles[0]}_cards"
            on_node = min(pool.cards, job.per_node)
            found.append(f"resource_pool_spec.{name}={[on_node] * (pool.cards // on_node)}")
            found += [f"role_mapping.{role}={name}" for role in pool.roles]
    for pool in placement.pools:
        for option in pool.options:
            found += [f"{key}={value}" for key, value in option.keys.items()]
    return [each.replace(" ", "") for each in found]


def why_refused(job: Job, placement: Placement) -> str | None:
    """What a run with its keys would be refused for; None if it would begin."""
    cluster = cluster_keys(job.device, job.num_cards, job.per_node)
    try:
        settings = [*job.settings, *cluster, *overrides_of(placement, job)]
        config = compose.load_config(settings, PPO, job.defaults)
        nominal_placement(config)
        check_memory(config, devices_of(config.trainer))
    except (ConfigError, PlacementError) as error:
        return str(error)
    return None


def head(job: Job) -> str:
    """What is planned, and what the numbers are worth."""
    data, rows = job.config.data, job.rows("actor")
    return (
        f"{job.num_cards:,} x {job.device.name}, {job.per_node} in a machine: "
        f"{data.train_batch_size:,} prompts a step, {rows.samples // rows.prompts} of each, "
        f"{rows.prompt:g} + {rows.mean_response:g} tokens "
        f"(at most {data.max_prompt_length:,} + {data.max_response_length:,})\n"
        f"{_worth(job)}"
    )


def _worth(job: Job) -> str:
    """Where the seconds come from."""
    rates = job.device.rates
    if job.factors:
        factors = ", ".join(
            f"{role}.{method} {of:.2f}" for (role, method), of in job.factors.items()
        )
        return f"Seconds are corrected by the run; its calls took, of what is predicted: {factors}"
    if job.device.measured:
        return f"Seconds are predicted from what {job.device.name} did in {job.device.measured}."
    return (
        f"Seconds are arithmetic, nothing is measured: {rates.flops:g} of the card's operations, "
        f"{rates.memory:g} of its memory's and {rates.link:g} of its links' bytes a second are "
        "assumed to be reached."
    )


def in_words(placement: Placement) -> str:
    """Roles and cards of every pool."""
    return " | ".join(f"{' + '.join(pool.roles)} on {pool.cards}" for pool in placement.pools)


def limit_of(placement: Placement) -> tuple[str, Pool, float]:
    """(stage, pool, seconds) of what takes longest."""
    seconds, number = max((each, at) for at, each in enumerate(placement.seconds))
    pool = max(placement.pools, key=lambda pool: pool.seconds[number])
    return STAGES[number], pool, seconds


def _table(best: Sequence[Placement], max_columns: int | None) -> str:
    lines: list[tuple[str, ...]] = [("", "seconds", *STAGES, "GiB", "limited by", "placement")]
    for number, placement in enumerate(best, 1):
        stage, pool, _ = limit_of(placement)
        most = max(pool.bytes for pool in placement.pools) / GIB
        stages = [f"{each:.1f}" for each in placement.seconds]
        limit = f"{stage} of {' + '.join(pool.roles)}"
        cells = f"{placement.step:.1f}", *stages, f"{most:.0f}", limit, in_words(placement)
        lines.append((str(number), *cells))
    return "\n".join(draw_table(lines, max_columns))


def _as_keys(job: Job, placement: Placement) -> str:
    keys = [f"  {each}" for each in overrides_of(placement, job)]
    lines = ["The first as keys:", *keys, "On each of its cards:"]
    for pool in placement.pools:
        parts = ", ".join(
            f"{each.role} {each.kept / GIB:.1f} kept and {each.call / GIB:.1f} in a call"
            for each in pool.options
        )
        lines.append(f"  {pool.bytes / GIB:.1f} of {job.device.gib:g} GiB: {parts}")
    return "\n".join(lines)


def _losers(found: Sequence[Placement], shown: Sequence[Placement]) -> str:
    """The fastest of every way to share cards that is not shown, and where it loses."""
    best, lines = shown[0], []
    seen = {_shares(placement) for placement in shown}
    for placement in found:
        shares = _shares(placement)
        if shares in seen:
            continue
        seen.add(shares)
        slower = [a - b for a, b in zip(placement.seconds, best.seconds, strict=True)]
        at = max(range(len(slower)), key=slower.__getitem__)
        pool = max(placement.pools, key=lambda pool: pool.seconds[at])
        lines.append(
            f"  {placement.step:.1f} s, {in_words(placement)}: {STAGES[at]} of "
            f"{' + '.join(pool.roles)} takes {slower[at]:.1f} s more"
        )
    return "\n".join(["Other ways to share the cards lose:", *(lines or ["  there are none"])])


def _shares(placement: Placement) -> frozenset[tuple[str, ...]]:
    return frozenset(tuple(pool.roles) for pool in placement.pools)


def _curve(job: Job, search: Search) -> str:
    """Seconds of a step over cards, and the fewest cards that are enough."""
    num_cards, per_node = job.num_cards, job.per_node
    lines = []
    doubling = {2**power for power in range(num_cards.bit_length())} | {num_cards}
    for number in sorted(doubling & set(sizes_of(num_cards, per_node))):
        found = search.best(sizes_of(number, per_node), number, 1, of_each=False)
        if found:
            best = found[0]
            lines.append(f"  {number:>5,} cards  {best.step:>8.1f} s  {in_words(best)}")
    return "\n".join(["Cards and seconds of a step, from the fewest that fit:", *lines])


def _fits_nowhere(job: Job, search: Search) -> ConfigError:
    """Which role is too large, and how many cards would do."""
    needs, num_cards = [], job.num_cards
    for role in job.roles:
        least = job.least_bytes(role, num_cards)
        needs.append(f"{role}: {'cannot be laid out' if least is None else f'{least / GIB:.1f}'}")
    enough = None
    number = 2 * num_cards
    while enough is None and number <= MOST_CARDS:
        if search.best(sizes_of(number, job.per_node), number, 1, of_each=False):
            enough = number
        number *= 2
    way_out = (
        f"{enough:,} of these cards are enough"
        if enough
        else f"{MOST_CARDS:,} of these cards are not enough either: take larger ones"
    )
    return ConfigError(
        f"No placement fits on {num_cards:,} x {job.device.name} of {job.device.gib:g} GiB. GiB "
        f"on each at least, alone on all of them: {', '.join(needs)}. {way_out}; or take shorter "
        "rows, LoRA (actor_rollout_ref.model.lora_rank), or actor_rollout_ref.model.dtype=bfloat16."
    )
