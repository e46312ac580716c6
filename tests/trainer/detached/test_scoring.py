"""What makers' roles say of samples, without models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trainer.detached.scoring import Reading, ScoresHere, join_readings, launch_readings
from verl_like.batch.protocol import DataProto


class Asked:
    """A group whose methods remember what they were given."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def __getattr__(self, method: str) -> Any:
        def remote(samples: Any) -> str:
            self.given[method] = samples
            return f"future of {method}"

        return SimpleNamespace(remote=remote)


class Answer:
    """A future whose result is there."""

    def __init__(self, metrics: dict[str, float], **columns: list[float]) -> None:
        tensors = {name: torch.tensor(values)[:, None] for name, values in columns.items()}
        self.result = DataProto.from_dict(tensors), metrics

    def get(self) -> Any:
        return self.result


def test_every_role_of_the_maker_gets_the_future_itself() -> None:
    groups = {name: Asked() for name in ("ref_1", "critic_copy_1", "reward_model_b_1")}
    roles = {name.removesuffix("_1"): name for name in groups}
    samples = object()
    readings = launch_readings(groups, roles, samples)
    assert groups["ref_1"].given == {"compute_ref_log_prob": samples}
    assert groups["critic_copy_1"].given == {"compute_values": samples}
    assert groups["reward_model_b_1"].given == {"compute_rm_score": samples}
    assert [reading.role for reading in readings] == ["ref", "critic_copy", "reward_model_b"]


def test_scores_of_two_models_stay_apart_and_numbers_come_along() -> None:
    readings = [
        Reading("ref", Answer({"perf/x": [1.0, 3.0]}, ref_log_prob=[0.5, 0.25])),
        Reading("reward_model", Answer({}, rm_scores=[1.0, 2.0])),
        Reading("reward_model_b", Answer({}, rm_scores=[3.0, 4.0])),
    ]
    rows = DataProto.from_dict({"responses": torch.zeros(2, 1)})
    rows, metrics = join_readings(rows, readings)
    assert metrics == {"perf/x": 2.0}
    assert rows.batch["ref_log_prob"].flatten().tolist() == [0.5, 0.25]
    for role, scores in (("reward_model", [1.0, 2.0]), ("reward_model_b", [3.0, 4.0])):
        found = ScoresHere(rows, role)
        assert found.done()
        assert found.get().batch["rm_scores"].flatten().tolist() == scores
