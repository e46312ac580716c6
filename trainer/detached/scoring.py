"""What makers score beside their rollout, with `detached.score_on=maker`.

`PPOTrainer.score` then finds the columns and makes none of them again. Scores of reward models stay
columns of their own until the trainer adds them up with those of functions and servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.loop import Metrics
from trainer.ppo.sizes import CRITIC_COPY
from trainer.rollouts.trainer import join_results
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.calls.result import Result
from workers.columns import read_columns, rm_column, select_reads

METHODS = {"ref": "compute_ref_log_prob", CRITIC_COPY: "compute_values"}
"""Role -> its method; all others are reward models."""
REWARD_METHOD = "compute_rm_score"
MADE_BY_MAKERS = frozenset(
    ["generate_sequences", "submit", "take", REWARD_METHOD, *METHODS.values()]
)


def score_samples(
    groups: Any, roles: Mapping[str, str], samples: DataProto
) -> tuple[DataProto, Metrics]:
    """The samples with what every role says of them, and the numbers that came with it.

    `roles` are those of one maker: role, as maker 0 has it -> its own name.
    """
    futures = []
    for role, own in roles.items():
        group, method = groups[own], METHODS.get(role, REWARD_METHOD)
        sent = select_reads(samples, group.roles[own], method)
        futures.append(getattr(group, method).remote(sent))
    results = []
    for role, answer in zip(roles, gather(*futures), strict=True):
        result = Result.of(answer)
        if role not in METHODS:
            result.batch.rename("rm_scores", rm_column(role))
        results.append(result)
    return join_results(samples, results)


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
