"""Use the rewards of environments as one of a run's rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from verl_like.batch.protocol import DataProto
from workers.columns import read_columns
from workers.rewards.manager import TermScores
from workers.rewards.outcome import group_by_kind

SECONDS = ("engine_s", "environment_s", "waiting_s")


class EnvironmentScores:
    """Reads the rewards that the rollout recorded.

    Failed trajectories have no score, unless they have a turn and `environment.reward_on_failure`
    is set.
    """

    def remote(self, batch: DataProto) -> Future[TermScores]:
        """Return a future of the batch's scores, which is already done."""
        columns = read_columns(batch, "environment_rewards", "turn", "response_mask")
        mask = columns["response_mask"].bool()
        infos = batch.non_tensor_batch["trajectory"].tolist()
        failed = torch.tensor([info["is_left_out"] for info in infos], dtype=torch.bool)
        uids = batch.non_tensor_batch["uid"]
        problems = [(str(uid), info["problem"]) for uid, info in zip(uids, infos, strict=True)]
        scores = TermScores(
            columns["environment_rewards"].masked_fill(failed[:, None], 0),
            turn_ends(columns["turn"], mask),
            failed,
            group_by_kind(pair for pair in problems if pair[1]),
            metrics=trajectory_metrics(infos),
        )
        done: Future[TermScores] = Future()
        done.set_result(scores)
        return done

    def close(self) -> None:
        """Do nothing; there are no resources."""


def turn_ends(turn: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a mask [rows, R] that is True at the last sampled token of every turn."""
    place = torch.arange(mask.shape[-1]).expand(mask.shape)
    after = torch.where(mask, place, -1)
    num_turns = int(turn.max()) + 1 if turn.numel() else 0
    ends = torch.zeros_like(mask)
    for number in range(num_turns):
        last = torch.where(turn == number, after, -1).amax(dim=-1)
        rows = (last >= 0).nonzero().flatten()
        ends[rows, last[rows]] = True
    return ends


def trajectory_metrics(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return metrics over trajectories; `infos` is the column `trajectory`."""
    count = max(len(infos), 1)
    ended = [info["ended"] for info in infos]
    metrics = {
        "reward/num_failed": float(sum(bool(info["problem"]) for info in infos)),
        "reward/num_timed_out": float(ended.count("deadline")),
        "agents/num_retries": float(sum(info["attempts"] - 1 for info in infos)),
        "agents/num_turns/mean": sum(info["num_turns"] for info in infos) / count,
        "agents/num_turns/max": float(max((info["num_turns"] for info in infos), default=0)),
    }
    for name in ("num_segments", "num_calls", "num_call_errors", *SECONDS):
        metrics[f"agents/{name}/mean"] = sum(info[name] for info in infos) / count
    for reason in ("terminated", "max_turns", "length", "deadline", "environment"):
        metrics[f"agents/ended/{reason}"] = ended.count(reason) / count
    for name, of_name in by_environment(infos).items():
        prefix, num_turns = f"agents/by_environment/{name}", [info["num_turns"] for info in of_name]
        metrics[f"{prefix}/share"] = len(of_name) / count
        metrics[f"{prefix}/num_turns/mean"] = sum(num_turns) / len(of_name)
        metrics[f"{prefix}/num_failed"] = float(sum(bool(info["problem"]) for info in of_name))
    return metrics


def by_environment(infos: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the trajectories of each environment by its name; {} if a run has only one."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for info in infos:
        name = info.get("environment")
        if name:
            groups.setdefault(name, []).append(info)
    return groups
