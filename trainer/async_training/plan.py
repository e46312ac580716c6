"""The part of the printed plan that only asynchronous runs have."""

from __future__ import annotations

from trainer.async_training.config import AsyncConfig, open_at_once, samples_per_batch

AGES = {0: "as new as the policy", 1: "at most 1 version old"}
MOMENTS = {"between_batches": "between two calls", "immediate": "in the middle of a call"}


def plan_lines(
    config: AsyncConfig, max_columns: int | None = None, brief: bool = False
) -> list[str]:
    """Describe routes, how far generators run ahead, and when weights reach them."""
    async_training, topology = config.async_training, config.topology
    generators, num_open = topology.generators, open_at_once(config)
    staleness, num_batches = async_training.max_staleness, async_training.update_steps
    age = AGES.get(staleness, f"at most {staleness} versions old")
    rounds = "batch" if num_batches == 1 else f"{num_batches} batches"
    aged = f"a sample is {age} when it is trained on; generators wait if a new one could get older"
    batch, most = (
        config.data.train_batch_size,
        max(map(config.chunks_in_parallel, range(generators))),
    )
    together = f"; a generator runs up to {most} together" if most > 1 else ""
    chunks = (
        f"a batch of {batch} prompts is {_count(batch // config.chunk_size, 'call')} of "
        f"{_count(config.chunk_size, 'prompt')}, each to one generator{together}"
    )
    queued = (
        f"at most {num_open} samples are queued or in generation "
        f"({num_open / samples_per_batch(config):.3g} times a batch)"
    )
    versions = (
        f"trainers send new weights after every {rounds}; "
        f"a generator takes them {MOMENTS[async_training.weight_update]}"
    )
    drawn = topology.describe(max_columns).splitlines()
    lines = [*drawn, chunks, aged, queued, versions]
    if roles := config.score_roles:
        lines.append(f"each generator scores its samples with its own {', '.join(roles)}")
    if weights := config.algorithm.rollout_correction.rollout_is:
        lines.append(f"samples of older weights are corrected: rollout_is={weights}")
    if brief:
        lines = [f"A sample is {age}; at most {num_open} are queued or in generation"]
    if topology.lopsided:
        lines.append(topology.lopsided)
    if idle := _idle_generators(config):
        lines.append(
            f"{idle} of {generators} generators have no work, because few chunks may be open at "
            "once. Use smaller ones (async_training.prompts_per_call), or a larger "
            "async_training.max_staleness"
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
    return f"{number} {noun}{'' if number == 1 else 's'}"
