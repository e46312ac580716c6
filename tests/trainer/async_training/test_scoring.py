"""Scores of generators' roles, without models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trainer.async_training.generator import score_samples
from trainer.rollouts.rollouts import ScoresInBatch
from verl_like.batch.protocol import DataProto
from verl_like.calls.result import CallResult


class Answer:
    """A group whose methods all return one finished result."""

    def __init__(self, metrics: dict[str, float], **columns: list[float]) -> None:
        tensors = {name: torch.tensor(values)[:, None] for name, values in columns.items()}
        self.result = CallResult(DataProto.from_dict(tensors), metrics)
        kind = SimpleNamespace(compute_ref_log_prob=Answer, compute_rm_score=Answer)
        self.roles = dict.fromkeys(("ref_1", "reward_model_1", "reward_model_b_1"), kind)
        self.asked: list[str] = []

    def __getattr__(self, method: str) -> Any:
        future = SimpleNamespace(get=lambda timeout=None: self.result)
        return SimpleNamespace(remote=lambda samples: self.asked.append(method) or future)


def test_scores_of_two_models_stay_apart_and_numbers_come_along() -> None:
    groups = {
        "ref_1": Answer({"perf/x": [1.0, 3.0]}, ref_log_prob=[0.5, 0.25]),
        "reward_model_1": Answer({}, rm_scores=[1.0, 2.0]),
        "reward_model_b_1": Answer({}, rm_scores=[3.0, 4.0]),
    }
    roles = {name.removesuffix("_1"): name for name in groups}
    rows = DataProto.from_dict({"responses": torch.zeros(2, 1)})
    rows, metrics = score_samples(groups, roles, rows)
    assert metrics == {"perf/x": 2.0}
    assert groups["ref_1"].asked == ["compute_ref_log_prob"]
    assert groups["reward_model_b_1"].asked == ["compute_rm_score"]
    assert rows.batch["ref_log_prob"].flatten().tolist() == [0.5, 0.25]
    for role, scores in (("reward_model", [1.0, 2.0]), ("reward_model_b", [3.0, 4.0])):
        found = ScoresInBatch(rows, role)
        assert found.done()
        assert found.get().batch["rm_scores"].flatten().tolist() == scores
