"""What a configuration comes to: who sends to whom, how large pieces and batches are."""

from __future__ import annotations

from trainer.detached.config import DetachedConfig
from trainer.detached.pieces import ANY_RANK
from trainer.detached.topology import Topology


def topology_of(config: DetachedConfig) -> Topology:
    """Who sends what to whom."""
    detached = config.detached
    return Topology.of(detached.makers, detached.trainers, detached.edges, detached.weight_edges)


def routed_ranks(topology: Topology) -> list[int]:
    """The trainer ranks whose samples come from makers of their own.

    Where every maker serves every rank, rows may go to any: one answer, `ANY_RANK`.
    """
    everything = topology.makers * topology.trainers
    if len(topology.experience) == everything:
        return [ANY_RANK]
    return list(range(topology.trainers))


def piece_size(config: DetachedConfig, topology: Topology) -> int:
    """Prompts of a piece: as configured, or a batch in equal parts for the makers."""
    size = config.data.train_batch_size
    if config.detached.prompts_per_piece is not None:
        return config.detached.prompts_per_piece
    ranks = len(routed_ranks(topology))
    makers = topology.makers if ranks == 1 else len(topology.makers_of(0))
    part = size // ranks
    return next(n for n in range(max(part // makers, 1), 0, -1) if part % n == 0)


def samples_per_batch(config: DetachedConfig) -> int:
    """Samples of a step."""
    return config.data.train_batch_size * config.actor_rollout_ref.rollout.n


def open_samples(config: DetachedConfig) -> int:
    """Samples that the bound of staleness lets be open while the trainer waits for a batch."""
    detached = config.detached
    return (detached.max_staleness + 1) * detached.update_steps * samples_per_batch(config)
