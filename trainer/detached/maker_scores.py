"""Scores by makers, with `detached.score_on=maker`: reference, critic copy and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.ppo.sizes import CRITIC_COPY
from trainer.record import Metrics
from trainer.rollouts.rollouts import join_results
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.calls.result import Result
from workers.columns import rm_column, select_reads

METHODS = {"ref": "compute_ref_log_prob", CRITIC_COPY: "compute_values"}
"""Role -> its method. All other roles are reward models."""
REWARD_METHOD = "compute_rm_score"
MADE_BY_MAKERS = frozenset(
    ["generate_sequences", "submit", "take", REWARD_METHOD, *METHODS.values()]
)


def score_samples(
    groups: Any, roles: Mapping[str, str], samples: DataProto
) -> tuple[DataProto, Metrics]:
    """Return the samples with the columns of every scoring role of one maker, and metrics.

    `roles` maps a role's name at maker 0 to its name at this maker. Each reward model has its own
    column until the trainer adds its scores to those of functions and servers.
    """
    futures = []
    for kind, role in roles.items():
        group, method = groups[role], METHODS.get(kind, REWARD_METHOD)
        sent = select_reads(samples, group.roles[role], method)
        futures.append(getattr(group, method).remote(sent))
    results = []
    for kind, answer in zip(roles, gather(*futures), strict=True):
        result = Result.of(answer)
        if kind not in METHODS:
            result.batch.rename("rm_scores", rm_column(kind))
        results.append(result)
    return join_results(samples, results)
