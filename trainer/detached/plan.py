"""What a detached run will do, in words, from its configuration alone: for `verl-like explain`.

`prediction_lines` adds what limits it, from the seconds that the phases took in another run.
"""

from __future__ import annotations

from trainer.detached.config import (
    DetachedConfig,
    idle_makers,
    open_at_once,
    samples_per_batch,
)
from trainer.detached.overlap import Phases, Setup, simulate, what_limits
from trainer.detached.roles import score_roles
from trainer.detached.topology import ANY_RANK, Topology

AGES = {0: "as new as the policy", 1: "at most 1 version old"}
MOMENTS = {"at_boundary": "between two pieces", "at_once": "in the middle of a piece"}


def plan_lines(config: DetachedConfig, max_columns: int | None = None) -> list[str]:
    """Who sends what to whom, how far makers run ahead, when weights reach them."""
    detached, topology, setup = config.detached, config.topology, setup_of(config)
    prompts, batch = config.piece_size, samples_per_batch(config)
    num_open = open_at_once(config)
    age = AGES.get(detached.max_staleness, f"at most {detached.max_staleness} versions old")
    rounds = "batch" if detached.update_steps == 1 else f"{detached.update_steps} batches"

    lines = [
        *topology.describe(max_columns).splitlines(),
        f"a batch of {config.data.train_batch_size} prompts is {_count(setup.num_pieces, 'piece')}:"
        f" {_count(prompts, 'prompt')} each, which one maker answers in a call",
        f"a sample is {age} when it is trained on: makers wait rather than let one grow older",
        f"at most {num_open} samples are queued or being made ({num_open / batch:.3g} times a "
        "batch)",
        f"there is a version of the weights after every {rounds}; "
        f"a maker takes it {MOMENTS[detached.new_weights]}",
    ]

    if roles := score_roles(config):
        lines.append(f"makers score what they have made, each with its own {', '.join(roles)}")
    if weights := config.algorithm.rollout_correction.rollout_is:
        lines.append(f"what older weights drew is corrected for: rollout_is={weights}")

    idle = idle_makers(config)
    if idle > 0:
        lines.append(
            f"{idle} of {topology.makers} makers have nothing to make, so few pieces are open at "
            "once: smaller ones (detached.prompts_per_piece), or a larger detached.max_staleness"
        )
    return lines


def prediction_lines(config: DetachedConfig, phases: Phases) -> list[str]:
    """Seconds a step, who is busy, and what limits the run, if its phases take as long."""
    setup = setup_of(config)
    found = simulate(phases, setup)
    shares = {role: f"{states['busy']:.0%}" for role, states in sorted(found.shares.items())}
    busy = ", ".join(f"{role} {share}" for role, share in shares.items())
    return [
        f"{found.seconds:.3g} s a step; busy: {busy}; limited by: {what_limits(phases, setup)}",
    ]


def setup_of(config: DetachedConfig) -> Setup:
    """The run as the simulation has it."""
    detached, topology = config.detached, config.topology
    prompts = config.piece_size
    return Setup(
        num_makers=topology.makers,
        num_trainers=1,  # the measured seconds are those of its ranks together
        max_staleness=detached.max_staleness,
        pieces=config.data.train_batch_size // prompts,
        limit=open_at_once(config) // (prompts * config.actor_rollout_ref.rollout.n),
        weights_at_once=detached.new_weights == "at_once",
        makers_by_rank=_makers_by_rank(topology),
    )


def _makers_by_rank(topology: Topology) -> tuple[tuple[int, ...], ...]:
    ranks = topology.routed_ranks
    return () if ranks == [ANY_RANK] else tuple(tuple(topology.makers_for(r)) for r in ranks)


def _count(number: int, what: str) -> str:
    """`1 piece`, `2 pieces`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
