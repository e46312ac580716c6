"""What a configuration comes to: how many samples a batch has, and how many may be open."""

from __future__ import annotations

from trainer.detached.config import DetachedConfig


def samples_per_batch(config: DetachedConfig) -> int:
    """Samples of a step."""
    return config.data.train_batch_size * config.actor_rollout_ref.rollout.n


def open_samples(config: DetachedConfig) -> int:
    """Samples that the bound of staleness lets be open while the trainer waits for a batch."""
    detached = config.detached
    return (detached.max_staleness + 1) * detached.update_steps * samples_per_batch(config)


def open_at_once(config: DetachedConfig) -> int:
    """Samples that staleness and the buffer let be queued or in the making."""
    limit = config.detached.limit
    return open_samples(config) if limit is None else min(limit, open_samples(config))


def idle_makers(config: DetachedConfig) -> int:
    """Makers for whom no piece is left, so few are open at once."""
    topology = config.topology
    samples_per_piece = config.piece_size * config.actor_rollout_ref.rollout.n
    num_open = open_at_once(config) // len(topology.routed_ranks) // samples_per_piece
    busy: set[int] = set()
    for rank in topology.routed_ranks:
        busy.update(topology.makers_for(rank)[:num_open])
    return topology.makers - len(busy)
