"""The part of the printed plan that only asynchronous runs have."""

from __future__ import annotations

from trainer.async_training.config import AsyncConfig, open_at_once

AGES = {0: "samples are of the newest version", 1: "samples are at most 1 version old"}
MOMENTS = {"between_batches": "between two calls", "immediate": "in the middle of a call"}


def plan_lines(config: AsyncConfig, brief: bool = False) -> list[str]:
    """Describe routes, how far generators run ahead, and when weights reach them."""
    async_training, topology = config.async_training, config.topology
    generators, num_open = topology.generators, open_at_once(config)
    staleness, num_batches = async_training.max_staleness, async_training.update_steps
    age = AGES.get(staleness, f"samples are at most {staleness} versions old")
    rounds = "batch" if num_batches == 1 else f"{num_batches} batches"
    if async_training.train_epochs > 1:
        rounds += f", trained on {async_training.train_epochs} times"
    batch = config.data.train_batch_size
    most = max(map(config.chunks_in_parallel, range(generators)))
    together = f", up to {most} calls per generator at the same time" if most > 1 else ""
    queued = f"at most {num_open:,} queued or in generation"
    lines = [
        *topology.describe().splitlines(),
        f"Batch: {batch:,} prompts in {_count(batch // config.chunk_size, 'call')} of "
        f"{_count(config.chunk_size, 'prompt')}; each call goes to one generator{together}",
        f"Staleness: {age} in an update, and generators pause when a new sample would exceed this",
        f"Samples: {queued} ({num_open / config.samples_per_batch:.3g} batches)",
        f"Weight sync: after every {rounds}, and a generator loads new weights "
        f"{MOMENTS[async_training.weight_update]}",
    ]
    roles = config.score_roles
    if roles:
        lines.append(f"Scores: each generator scores its samples with its own {', '.join(roles)}")
    weights = config.algorithm.rollout_correction.rollout_is
    if weights:
        lines.append(f"Correction: rollout_is={weights} (algorithm.rollout_correction)")
    if brief:
        lines = [f"Staleness: {age}, {queued}"]
    if topology.imbalance:
        lines.append(f"Uneven generators: {topology.imbalance}.")
    idle = _idle_generators(config)
    if idle:
        limits = "async_training.max_staleness"
        if async_training.max_inflight_samples is not None:
            limits = f"async_training.max_inflight_samples or {limits}"
        lines.append(
            f"Idle generators: {idle} of {generators}, because too few samples may be queued or in "
            f"generation. Lower async_training.prompts_per_call, or raise {limits}."
        )
    return lines


def _idle_generators(config: AsyncConfig) -> int:
    """Count the generators that have no work because too few chunks may be open."""
    ranks = config.topology.routed_ranks
    samples_per_chunk = config.chunk_size * config.actor_rollout_ref.rollout.n
    num_open = open_at_once(config) // len(ranks) // samples_per_chunk
    busy = {
        generator for rank in ranks for generator in config.topology.generators_for(rank)[:num_open]
    }
    return config.topology.generators - len(busy)


def _count(number: int, noun: str) -> str:
    """Return words such as `1 chunk` and `2 chunks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
