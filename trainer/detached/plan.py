"""The plan of a detached run in words, from its configuration."""

from __future__ import annotations

from trainer.detached.config import DetachedConfig, open_at_once, samples_per_batch

AGES = {0: "as new as the policy", 1: "at most 1 version old"}
MOMENTS = {"at_boundary": "between two pieces", "at_once": "in the middle of a piece"}


def plan_lines(
    config: DetachedConfig, max_columns: int | None = None, brief: bool = False
) -> list[str]:
    """Who sends what to whom, how far makers run ahead, when weights reach them."""
    detached, topology = config.detached, config.topology
    makers, num_open = topology.makers, open_at_once(config)
    age = AGES.get(detached.max_staleness, f"at most {detached.max_staleness} versions old")
    rounds = "batch" if detached.update_steps == 1 else f"{detached.update_steps} batches"

    aged = f"a sample is {age} when it is trained on: makers wait rather than let one grow older"
    batch, most = config.data.train_batch_size, max(map(config.pieces_at_once, range(makers)))
    together = f"; a maker answers up to {most} together" if most > 1 else ""
    pieces = (
        f"a batch of {batch} prompts is {_count(batch // config.piece_size, 'piece')}: "
        f"{_count(config.piece_size, 'prompt')} each, which one maker answers in a call{together}"
    )
    queued = (
        f"at most {num_open} samples are queued or being made "
        f"({num_open / samples_per_batch(config):.3g} times a batch)"
    )
    versions = (
        f"there is a version of the weights after every {rounds}; "
        f"a maker takes it {MOMENTS[detached.new_weights]}"
    )
    drawn = topology.describe(max_columns).splitlines()
    lines = [*drawn, pieces, aged, queued, versions]
    if roles := config.score_roles:
        lines.append(f"makers score what they have made, each with its own {', '.join(roles)}")
    if weights := config.algorithm.rollout_correction.rollout_is:
        lines.append(f"what older weights drew is corrected for: rollout_is={weights}")
    if brief:
        lines = [f"A sample is {age}; at most {num_open} are queued or being made"]
    if topology.lopsided:
        lines.append(topology.lopsided)
    if idle := _idle_makers(config):
        lines.append(
            f"{idle} of {makers} makers have nothing to make, so few pieces are open at "
            "once: smaller ones (detached.prompts_per_piece), or a larger detached.max_staleness"
        )
    return lines


def _idle_makers(config: DetachedConfig) -> int:
    """Makers for whom no piece is left, so few are open at once."""
    ranks = config.topology.routed_ranks
    samples_per_piece = config.piece_size * config.actor_rollout_ref.rollout.n
    num_open = open_at_once(config) // len(ranks) // samples_per_piece
    busy = {maker for rank in ranks for maker in config.topology.makers_for(rank)[:num_open]}
    return config.topology.makers - len(busy)


def _count(number: int, what: str) -> str:
    """`1 piece`, `2 pieces`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
