"""What makers score beside their rollout, with `detached.score_on=maker`.

    readings = launch_readings(groups, roles, samples)     # a maker's thread; nothing is fetched
    for reading in readings: reading.future.wait()
    rows, metrics = join_readings(rows, readings)          # the trainer's, when it takes the rows

`PPOTrainer.score` then finds the columns and makes none of them again. Scores of reward models stay
columns of their own until the trainer adds them up with those of functions and servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.loop import Metrics
from trainer.ppo.sizes import CRITIC_COPY
from trainer.rollouts.trainer import join_results
from verl_like.batch.protocol import DataProto
from workers.columns import read_columns, rm_column, select_reads

METHODS = {"ref": "compute_ref_log_prob", CRITIC_COPY: "compute_values"}
"""Role -> its method; all others are reward models."""
REWARD_METHOD = "compute_rm_score"
MADE_BY_MAKERS = frozenset(["generate_sequences", REWARD_METHOD, *METHODS.values()])


@dataclass(frozen=True)
class Reading:
    """What one role says of the samples of a piece."""

    role: str
    """As maker 0 has it."""
    future: Any


def launch_readings(groups: Any, roles: Mapping[str, str], samples: Any) -> list[Reading]:
    """Start every role on these samples, or on the future of them, whose pieces then go there.

    `roles` are those of one maker: role, as maker 0 has it -> its own name.
    """
    readings = []
    for role, own in roles.items():
        group, method = groups[own], METHODS.get(role, REWARD_METHOD)
        sent = samples
        if isinstance(samples, DataProto):
            sent = select_reads(samples, group.roles[own], method)
        readings.append(Reading(role, getattr(group, method).remote(sent)))
    return readings


def join_readings(rows: DataProto, readings: Iterable[Reading]) -> tuple[DataProto, Metrics]:
    """The rows with what was read of them, and the numbers that came with it."""
    results = []
    for reading in readings:
        result = reading.future.get()
        if reading.role not in METHODS:
            batch = result[0] if isinstance(result, tuple) else result
            batch.rename("rm_scores", rm_column(reading.role))
        results.append(result)
    return join_results(rows, results)


class ScoresHere:
    """The future of a reward model's scores that a maker has brought along."""

    def __init__(self, batch: DataProto, role: str) -> None:
        """`role` as maker 0 has it."""
        self._role, column = role, rm_column(role)
        self._scores = read_columns(batch, column)[column]

    def __str__(self) -> str:
        """The role, for messages about a failure."""
        return f"scores of {self._role}"

    def done(self) -> bool:
        """Nothing is waited for."""
        return True

    def get(self, timeout: float | None = None) -> DataProto:
        """What `compute_rm_score` returns."""
        return DataProto.from_dict({"rm_scores": self._scores})
