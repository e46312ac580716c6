"""Predict an asynchronous run: simulate a measured run's phases with another configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.async_training.config import AsyncConfig, open_at_once
from trainer.async_training.topology import ANY_RANK, Topology
from trainer.planner.simulate import Phases, Setup, bottleneck, simulate
from trainer.report.async_training import seconds_by_role
from trainer.report.read import RunData, read_run
from verl_like.errors import ConfigError


def measured_phases(folder: str | Path) -> tuple[Phases, list[str]]:
    """Return the phases of the run in `folder`, synchronous or asynchronous, and notes on them.

    The first step is left out if there are others, because caches and compilers warm up in it.
    """
    data = read_run(folder)
    timed = [line for line in data.metrics if line.get("timing_s/gen", 0.0) > 0.0]
    if not timed:
        raise ConfigError(
            f"{folder}/metrics.jsonl has no timing_s/gen, so the time of generation is unknown; "
            "give a PPO run, or the seconds by --gen, --score, --update and --sync."
        )
    timed = timed[1:] or timed
    phases = Phases(*map(list, zip(*map(_phases_of, timed), strict=True)))
    steps = f"{timed[0]['step']:.0f} to {timed[-1]['step']:.0f}"
    notes = [f"measured in steps {steps} of {folder}"]
    if _shared_pools(data):
        notes.append(
            "its generators and trainers share devices: what follows is for generators that have "
            "as many again for themselves; with half of them each, both take about twice as long"
        )
    return phases, notes


def _phases_of(line: Mapping[str, float]) -> tuple[float, float, float, float]:
    """Return the seconds of a step's generation, scores, update and weight sync.

    The generation of an asynchronous run is the busy time of its generators, not the wait for it.
    """
    generate, score = line["timing_s/gen"], line.get("timing_s/score", 0.0)
    sync = line.get("timing_s/update_weights", 0.0)
    rest = line["timing_s/step"] - generate - score
    generators = [spent for role, spent in seconds_by_role([line]).items() if role != "trainer"]
    if any(spent["busy"] for spent in generators):
        generate = sum(spent["busy"] for spent in generators)
        sync = max(spent["syncing"] for spent in generators)
    else:
        rest -= sync
    return generate, score, max(rest, 0.0), sync


def _shared_pools(data: RunData) -> set[str]:
    """Return the pools that both generated and trained."""
    generated, trained = (
        {call.pool for call in data.calls if call.method in methods}
        for methods in (("generate_sequences", "take"), ("update_actor",))
    )
    return generated & trained


def setup_of(config: AsyncConfig) -> Setup:
    """Return the setup of the simulation; pieces that a generator begins together count as one."""
    async_training, topology = config.async_training, config.topology
    numbers = {config.pieces_at_once(generator) for generator in range(topology.generators)}
    at_once = numbers.pop() if len(numbers) == 1 else 1  # one by one is no faster
    prompts = config.piece_size * at_once
    return Setup(
        num_generators=topology.generators,
        num_trainers=1,  # the measured seconds include all of its ranks
        max_staleness=async_training.max_staleness,
        pieces=config.data.train_batch_size // prompts,
        limit=open_at_once(config) // (prompts * config.actor_rollout_ref.rollout.n),
        weights_at_once=async_training.weight_update == "at_once",
        generators_by_rank=tuple(sorted(generators_by_rank(topology))[::at_once]),
    )


def generators_by_rank(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Return each rank's generators; empty if any rank takes any sample."""
    ranks = topology.routed_ranks
    return tuple(tuple(topology.generators_for(r)) for r in ranks) if ranks != [ANY_RANK] else ()


def prediction_line(config: AsyncConfig, phases: Phases) -> str:
    """Describe the seconds per step, the busy shares, and the limit, if phases take as long."""
    setup = setup_of(config)
    prediction = simulate(phases, setup)
    shares = {role: f"{states['busy']:.0%}" for role, states in sorted(prediction.shares.items())}
    busy = ", ".join(f"{role} {share}" for role, share in shares.items())
    return (
        f"{prediction.seconds:.3g} s a step; busy: {busy}; limited by: {bottleneck(phases, setup)}"
    )
