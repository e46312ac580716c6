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

  verl-like plan plan.gpus=16 plan.device=H100 actor_rollout_ref.model.path=y
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from trainer.config.devices import devices_of
from trainer.launch import nominal_placement
from trainer.planner.devices import NUMBERS, Device, device_of
from trainer.planner.layouts import STAGES, Job
from trainer.planner.search import Placement, Pool, Search
from trainer.ppo.memory import check_memory
from trainer.ppo.recipe import load_config
from verl_like.errors import ConfigError, PlacementError, nearest
from verl_like.terminal import draw_table, terminal_width
from workers.memory import GIB

SHOWN = 5
MOST_CARDS = 4096
ASKED = ("gpus", "device", "per_node", "mean_prompt", "mean_response", *NUMBERS)


def main(arguments: Sequence[str]) -> None:
    """Print the plan."""
    logging.getLogger("trainer.config.compose").setLevel(logging.ERROR)  # dropped pools
    torch.set_num_threads(1)  # models are tried out at tiny sizes, where more threads cost time
    print(plan(arguments, terminal_width()))


def plan(arguments: Sequence[str], max_columns: int | None = None) -> str:
    """The text for these arguments."""
    job = job_of(arguments)
    search = Search(job.roles, job.options, job.device.bytes)
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


def job_of(arguments: Sequence[str]) -> Job:
    """What is planned."""
    asked, keys = _parsed(arguments)
    if not any(key.startswith("data.train_files=") for key in keys):
        keys.append("data.train_files=prompts.parquet")  # which nobody opens here
    num_cards, per_node = asked["gpus"], asked.get("per_node", 8)
    if num_cards > per_node and num_cards % per_node:
        below = num_cards - num_cards % per_node
        raise ConfigError(
            f"plan.gpus={num_cards} are no whole machines of plan.per_node={per_node}: give "
            f"{below} or {below + per_node}."
        )
    device = device_of(asked["device"], {name: asked[name] for name in NUMBERS if name in asked})
    config = load_config([*keys, *cluster_keys(device, num_cards, per_node)])
    lengths = {}
    for part in ("prompt", "response"):
        most = getattr(config.data, f"max_{part}_length")
        lengths[part] = asked.get(f"mean_{part}", most / 2)
        if lengths[part] > most:
            raise ConfigError(
                f"plan.mean_{part}={lengths[part]:g} is above data.max_{part}_length={most}."
            )
    means = lengths["prompt"], lengths["response"]
    job = Job(config, keys, device, num_cards, per_node, *means)
    job.check()
    return job


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
        asked[short] = value if short == "device" else _number(name, value)
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
    return [
        f"trainer.pretend={on_node}x{device.gib:g}GiB",
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
        config = load_config([*job.settings, *cluster, *overrides_of(placement, job)])
        nominal_placement(config)
        check_memory(config, devices_of(config.trainer))
    except (ConfigError, PlacementError) as error:
        return str(error)
    return None


def head(job: Job) -> str:
    """What is planned, and what the numbers are worth."""
    data, rows, rates = job.config.data, job.rows("actor"), job.device.rates
    return (
        f"{job.num_cards:,} x {job.device.name}, {job.per_node} in a machine: "
        f"{data.train_batch_size:,} prompts a step, {rows.samples // rows.prompts} of each, "
        f"{rows.prompt:g} + {rows.mean_response:g} tokens "
        f"(at most {data.max_prompt_length:,} + {data.max_response_length:,})\n"
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
        found = search.best(sizes_of(number, per_node), number, 1)
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
        if search.best(sizes_of(number, job.per_node), number, 1):
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
