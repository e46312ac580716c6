"""Dumps of other frameworks as sides of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.cli.bisect import bisect
from trainer.tools.bisect.adapters.tinker import TinkerRecorder
from trainer.tools.bisect.sides import open_side
from verl_like.record import RecordError


def slime_sample(reward: float) -> dict[str, Any]:
    row = {"tokens": [5, 6, 7, 8], "response_length": 2, "loss_mask": [1, 1], "group_index": 0}
    return row | {"reward": reward, "status": "completed", "rollout_log_probs": [-0.5, -1.0]}


def test_the_first_different_reward_of_two_dumps_of_slime_is_found(tmp_path: Path) -> None:
    for name, reward in (("a", 1.0), ("b", 0.5)):
        (tmp_path / name).mkdir()
        samples = [slime_sample(1.0), slime_sample(reward)]
        torch.save({"rollout_id": 0, "samples": samples}, tmp_path / name / "0.pt")
    finding = bisect(f"slime:{tmp_path}/a", f"slime:{tmp_path}/b")
    assert (finding.stage, finding.row, finding.a, finding.b) == ("scores", 1, 1.0, 0.5)


def test_a_dump_of_slime_with_code_is_not_executed(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    torch.save({"samples": [Hostile()]}, tmp_path / "0.pt")
    with pytest.raises(RecordError, match=r"0\.pt"):
        open_side(f"slime:{tmp_path}").load(1)
    assert not (tmp_path / "executed").exists()


def test_a_dump_of_verl_differs_at_the_first_different_text(tmp_path: Path) -> None:
    for name, output in (("a", "4"), ("b", "5")):
        (tmp_path / name).mkdir()
        rows = [{"input": "2+2=", "output": text, "score": 0.0} for text in ("4", output)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "1.jsonl").write_text(text, encoding="utf-8")
    finding = bisect(f"verl:{tmp_path}/a", f"verl:{tmp_path}/b")
    assert (finding.stage, finding.row) == ("samples", 1)


def test_the_loop_of_a_client_is_a_record(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-4), ("b", 2e-4)):
        recorder = TinkerRecorder(str(tmp_path / name), {"learning_rate": lr})
        recorder.step(1, [[1, 2]], [[3]], [[-1.0]], [0.5], [0.1], [0], lr=lr)
    finding = bisect(f"tinker:{tmp_path}/a", f"tinker:{tmp_path}/b")
    assert finding.stage == "learning rate"
    assert "learning_rate is 0.0001 in A" in str(finding.causes)
