"""The rewards that environments gave, as one of a run's rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from verl_like.batch.protocol import DataProto
from workers.columns import read_columns
from workers.rewards.failures import by_kind
from workers.rewards.manager import FAILURES, Scored


class EnvironmentScores:
    """Reads what the rollout wrote; a trajectory whose environment failed has no score."""

    def remote(self, batch: DataProto) -> Future[Scored]:
        """The scores of a batch, which are there."""
        found = read_columns(batch, "environment_rewards", "turn", "response_mask")
        mask = found["response_mask"].bool()
        facts = batch.non_tensor_batch["episode"].tolist()
        failed = torch.tensor([one["is_left_out"] for one in facts], dtype=torch.bool)
        uids = batch.non_tensor_batch["uid"]
        problems = [(str(uid), one["problem"]) for uid, one in zip(uids, facts, strict=True)]
        result = DataProto.from_dict(
            tensors={
                "token_level_scores": found["environment_rewards"].masked_fill(failed[:, None], 0),
                "step_ends": turn_ends(found["turn"], mask),
                "score_failed": failed,
            },
            meta_info={FAILURES: by_kind(pair for pair in problems if pair[1])},
        )
        done: Future[Scored] = Future()
        done.set_result((result, trajectory_metrics(facts)))
        return done

    def close(self) -> None:
        """Nothing is held."""


def turn_ends(turn: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[rows, R], true at the last drawn token of every turn."""
    place = torch.arange(mask.shape[-1]).expand(mask.shape)
    after = torch.where(mask, place, -1)
    num_turns = int(turn.max()) + 1 if turn.numel() else 0
    ends = torch.zeros_like(mask)
    for number in range(num_turns):
        last = torch.where(turn == number, after, -1).amax(dim=-1)
        rows = (last >= 0).nonzero().flatten()
        ends[rows, last[rows]] = True
    return ends


def trajectory_metrics(facts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means and counts over trajectories, of what their column `episode` says."""
    count = max(len(facts), 1)
    ended = [one["ended"] for one in facts]
    metrics = {
        "reward/num_failed": float(sum(bool(one["problem"]) for one in facts)),
        "reward/num_timed_out": float(ended.count("deadline")),
        "agents/num_retries": float(sum(one["attempts"] - 1 for one in facts)),
        "agents/num_turns/mean": sum(one["num_turns"] for one in facts) / count,
        "agents/num_turns/max": float(max((one["num_turns"] for one in facts), default=0)),
        "agents/num_segments/mean": sum(one["num_segments"] for one in facts) / count,
        "agents/num_calls/mean": sum(one["num_calls"] for one in facts) / count,
        "agents/num_call_errors/mean": sum(one["num_call_errors"] for one in facts) / count,
        "agents/engine_s/mean": sum(one["engine_s"] for one in facts) / count,
        "agents/environment_s/mean": sum(one["environment_s"] for one in facts) / count,
        "agents/waiting_s/mean": sum(one["waiting_s"] for one in facts) / count,
    }
    for reason in ("terminated", "max_turns", "length", "deadline", "environment"):
        metrics[f"agents/ended/{reason}"] = ended.count(reason) / count
    return metrics
