"""The text of a plan: the best placements, their memory, and why others lose."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from trainer.config.devices import run_devices
from trainer.memory import in_gib, memory_table
from trainer.tools.planner.cost import measured_on
from trainer.tools.planner.job import Job, cluster_keys, layout_keys
from trainer.tools.planner.ppo import ROLLOUT, PPOJob
from trainer.tools.planner.search import PlannedPlacement, RoleLayout
from verl_like.errors import ConfigError
from verl_like.terminal import draw_table
from workers.memory import usable_bytes

MAX_SHOWN = 5
MAX_GPUS = 4096
NO_FILES = "data.train_files=rows.parquet"
"""The setting if the user sets no files; the plan does not open this file."""
PREDICTED = (
    "Seconds are predicted, not measured: the operations of the model's class, recorded on the "
    "meta device, at rates of this GPU (vLLM: bytes of weights and KV cache)."
)

STAGES = (
    "Seconds of a step and of its stages: sample, score (log-probs, values, rewards), update, "
    "and sync (send the weights to the engine)"
)


def plan_text(job: Job) -> str:
    """Search the placements, and return the plan as text."""
    placements = job.best(job.num_gpus)
    if not placements:
        raise fits_nowhere(job)
    best, rejected = split_valid(job, placements)
    if not best:
        raise ConfigError(f"a run rejects every placement. The fastest one: {rejected[0]}")
    if len(job.roles) == 1:
        kind, slower = "layout", _other_layouts(job, best)
    else:
        not_checked = placements[len(best) + len(rejected) :]
        kind, slower = "placement", _slower_partitions(job, not_checked, best[0])
    shown = rejected[:MAX_SHOWN]
    more = rejected[MAX_SHOWN:]
    if more:
        shown.append(f"and {len(more)} more")
    first = best[0]
    config = job.configured(first)
    gpus = replace(run_devices(config.trainer), gpu=job.device.name)
    trained = next(role for role, model in job.models.items() if model.trains)
    samples = job.rows(trained).samples
    steps = job.config.trainer.total_training_steps
    if steps is None:
        length = "set trainer.total_training_steps to see the duration of the run"
    else:
        length = f"the run of {steps:,} steps takes {three_digits(steps * first.step / 3600)} hours"
    speed = (
        f"Fastest: {first.summary}: {three_digits(first.step)} s per step, "
        f"{three_digits(samples / first.step)} samples per second; {length}."
    )
    cluster = cluster_keys(job.device, job.num_gpus, job.per_node)
    all_gpus = cluster.pop("trainer.simulate")
    keys = [f"{key}={value}" for key, value in cluster.items() if key not in job.keys]
    keys += job.overrides(first)
    check = f"verl-like check {job.recipe.name} --full --gpus {all_gpus}"
    no_files = NO_FILES in job.settings
    files = ", and your files instead of rows.parquet" if no_files else ""
    command = " \\\n    ".join([check, *map(shlex.quote, [*job.settings, *keys])])
    parts = [
        f"{speed}\n"
        f"GPUs: {job.num_gpus:,} x {job.device.name}, {min(job.num_gpus, job.per_node)} per node\n"
        f"Step: {job.describe_rows}\n{_engine(job)}{PREDICTED} {_evidence(job)}",
        job.traced[1],
        "\n".join(_table(job, best)),
        memory_table(job.memories(config), gpus, heading=f"Memory of {kind} 1"),
        _listed(f"Slower than {kind} 1:", [*islice(slower, MAX_SHOWN)]),
        _listed(f"{kind.title()}s that a run rejects:", shown),
        f"Next: check a run with your settings and the keys of {kind} 1{files}:\n  {command}",
    ]
    return "\n\n".join(part for part in parts if part)


def _engine(job: Job) -> str:
    """Return a line about the engine if this machine's packages chose it, or ""."""
    name = f"{ROLLOUT}.name"
    if not isinstance(job, PPOJob) or name in job.keys:
        return ""
    engine = job.config.actor_rollout_ref.rollout.name
    if engine == "vllm":
        return "Engine: vllm\n"
    return f"Engine: {engine} (no tested vLLM is installed here; add {name}=vllm to use it)\n"


def _evidence(job: Job) -> str:
    """Return which figures were ever measured on this GPU."""
    figures = measured_on(job.device.name)
    if not figures:
        return f"Nothing was ever measured on this GPU ({job.device.name})."
    return (
        f"{len(figures)} figures were measured on one {job.device.name}: updates, log-probs, "
        "native generation and sampling of 0.5B and 1.5B; nothing on several, or with vLLM."
    )


def split_valid(
    job: Job, placements: Sequence[PlannedPlacement]
) -> tuple[list[PlannedPlacement], list[str]]:
    """Check placements, fastest first, until enough are valid.

    Return the valid ones, and lines that say why a run rejects the others.
    """
    best: list[PlannedPlacement] = []
    rejected = []
    for placement in placements:
        error = job.rejection(placement)
        if error is None:
            best.append(placement)
        else:
            rejected.append(f"{placement.summary}: {error}")
        if len(best) == MAX_SHOWN:
            break
    return best, rejected


def fits_nowhere(job: Job) -> ConfigError:
    """Return an error with each role's minimum memory and, if known, a sufficient GPU number."""
    needs, usable = [], [job.device.memory_gib]
    for role in job.roles:
        memories = [layout.memory for layout in job.layouts(role, job.num_gpus)]
        least = min((memory.resident + memory.call for memory in memories), default=0.0)
        usable += [usable_bytes([m], "cuda", job.device.bytes) / 2**30 for m in memories]
        need = in_gib(least)
        if not memories:
            samples = job.rows(role).samples
            need = f"no layout is possible ({samples:,} rows, {job.per_node} GPUs per node)"
        needs.append(f"{role}: {need}")
    number = 2 * job.num_gpus
    while number <= MAX_GPUS and not job.best(number):
        number *= 2
    remedy = f"{number:,} of these GPUs are enough"
    if number > MAX_GPUS:
        remedy = f"{number // 2:,} of these GPUs are not enough either"
    trained = next(role_model for role_model in job.models.values() if role_model.trains)
    section, smaller = trained.key.removesuffix(".path"), ["larger GPUs", "shorter rows"]
    if trained.model.lora_rank == 0:
        smaller.append(f"LoRA ({section}.lora_rank)")
    if trained.model.dtype == "float32":
        smaller.append(f"{section}.dtype=bfloat16")
    if isinstance(job, PPOJob) and job.config.actor_rollout_ref.rollout.name != "vllm":
        smaller += [f"{ROLLOUT}.name=vllm", f"a smaller {ROLLOUT}.kv_cache_gib"]
    return ConfigError(
        f"no placement fits on {job.num_gpus:,} x {job.device.name} of "
        f"{job.device.memory_gib:g} GiB, of which {min(usable):.0f} are usable. "
        f"Minimum GiB per GPU for each role alone: {', '.join(needs)}. {remedy}. "
        f"Alternatives: {', '.join(smaller)}."
    )


def _listed(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)]) if lines else ""


def _table(job: Job, best: Sequence[PlannedPlacement]) -> list[str]:
    """Return a table of the placements, or of the layouts if there is a single role."""
    stages = job.stages if len(job.stages) > 1 else ()
    titles: tuple[str, ...] = ("limited by", "placement on GPUs")
    cells: list[tuple[str, ...]] = [(p.limit(job.stages), p.summary) for p in best]
    footer: list[str] = []
    if len(job.roles) == 1:
        settings = [layout_keys(placement) for placement in best]
        shared = set(settings[0]).intersection(*settings)
        titles = ("settings",)
        cells = [(", ".join(key for key in keys if key not in shared) or "-",) for keys in settings]
        footer = [f"All of them set {', '.join(sorted(shared))}."] if shared else []

    rows = [("", "s/step", *stages, "GiB/GPU", *titles)]
    for number, placement in enumerate(best, 1):
        seconds = (placement.step, *(placement.seconds if stages else ()))
        most = max(pool.bytes for pool in placement.pools)
        rows.append((str(number), *map(three_digits, seconds), in_gib(most), *cells[number - 1]))
    return [*([STAGES] if stages else []), *draw_table(rows), *footer]


def three_digits(number: float) -> str:
    """Format a number: two decimals below 10, one below 100, otherwise none; or `<0.01`."""
    if 0 < number < 0.01:
        return "<0.01"
    return f"{number:,.{2 if number < 9.995 else int(number < 99.95)}f}"


def _slower_partitions(
    job: Job, placements: Sequence[PlannedPlacement], best: PlannedPlacement
) -> Iterator[str]:
    """Yield a line on why each of these partitions of the roles is slower than the best one."""
    for placement in placements:
        pairs = zip(placement.seconds, best.seconds, strict=True)
        slower = [seconds - fastest for seconds, fastest in pairs]
        at = max(range(len(slower)), key=slower.__getitem__)
        yield (
            f"{three_digits(placement.step)} s, {placement.summary}: {job.stages[at]} of "
            f"{placement.slowest_in(at)} takes {three_digits(slower[at])} s more"
        )


def _other_layouts(job: Job, best: Sequence[PlannedPlacement]) -> Iterator[str]:
    """Yield a line per key value that is not in `best`: its speed, or the memory that it needs."""
    shown = {key for placement in best for key in layout_keys(placement)}
    layouts: dict[str, list[RoleLayout]] = {}
    for layout in job.layouts(job.roles[0], best[0].pools[0].gpus):
        for key, value in layout.keys.items():
            layouts.setdefault(f"{key}={value}", []).append(layout)
    for key, with_key in layouts.items():
        if key in shown:
            continue
        fitting = [layout.total for layout in with_key if job.fits(layout)]
        if fitting:
            extra = three_digits(min(fitting) - best[0].step)
            yield f"{key}: {three_digits(min(fitting))} s, {extra} s more"
        else:
            least = min(layout.memory.resident + layout.memory.call for layout in with_key)
            yield f"{key}: needs at least {in_gib(least)} GiB"
