"""Dumps of other frameworks as sides of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.cli.bisect import bisect
from trainer.tools.bisect.adapters import datum_arrays
from trainer.tools.bisect.probes import fitting_settings
from trainer.tools.bisect.sides import Step, open_side
from verl_like.record import Recorder, RecordError


def slime_dump(folder: Path, reward: Any) -> None:
    """Write the dump of two samples, by slime's own function if slime is here."""
    row = {"tokens": [5, 6, 7, 8], "response_length": 2, "loss_mask": [1, 1], "group_index": 0}
    rows = [row | {"reward": x, "rollout_log_probs": [-0.5, -1.0]} for x in (1.0, reward)]
    folder.mkdir()
    try:
        from slime.observability.rollout_data_utils import save_debug_rollout_data
        from slime.utils.types import Sample
    except ImportError:
        samples = [row | {"status": "completed"} for row in rows]
        torch.save({"rollout_id": 0, "samples": samples}, folder / "0.pt")
        return
    samples = [Sample(status=Sample.Status.COMPLETED, **row) for row in rows]
    template = f"{folder}/{{rollout_id}}.pt"
    save_debug_rollout_data(template, samples, rollout_id=0, evaluation=False)


@pytest.mark.parametrize("reward", [0.5, np.float64(0.5), np.float32(0.5)], ids=repr)
def test_the_first_different_reward_of_two_dumps_of_slime_is_found(
    tmp_path: Path, reward: Any
) -> None:
    slime_dump(tmp_path / "a", 1.0)
    slime_dump(tmp_path / "b", reward)
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


def test_the_loop_of_a_client_of_tinker_is_a_record(tmp_path: Path) -> None:
    """The data are made by tinker_cookbook from two trajectories of two turns each."""
    tinker = pytest.importorskip("tinker")
    cookbook = pytest.importorskip("tinker_cookbook.rl.data_processing")
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

    def turn(seen: list[int], said: list[int], last: bool) -> Any:
        logprobs = [-0.5 * token for token in said]
        sampled = TokensWithLogprobs(tokens=said, maybe_logprobs=logprobs)
        return Transition(
            ob=tinker.ModelInput.from_ints(seen), ac=sampled, reward=0.0, episode_done=last
        )

    end = tinker.ModelInput.from_ints([])
    trajectories = [
        Trajectory([turn([1, 2], [3], False), turn([1, 2, 3, 4], [5, 6], True)], end),
        Trajectory([turn([1, 2], [7], False), turn([1, 2, 7, 4], [8], True)], end),
    ]
    group = TrajectoryGroup(trajectories, final_rewards_G=[1.0, 0.0], metrics_G=[{}, {}])
    advantages = cookbook.compute_advantages([group])
    data, _ = cookbook.assemble_training_data([group], advantages)
    arrays = datum_arrays(data, scores=[1.0, 0.0])
    assert arrays["prompts"].tolist() == [[1, 2], [1, 2]]
    assert arrays["responses"].tolist() == [[3, 4, 5, 6], [7, 4, 8, 0]]
    assert arrays["response_mask"].tolist() == [[1, 0, 1, 1], [1, 0, 1, 0]]
    for name, lr in (("a", 1e-4), ("b", 2e-4)):
        Recorder(tmp_path / name, "tinker", {"learning_rate": lr}).step(1, arrays, lr=lr)
    finding = bisect(f"tinker:{tmp_path}/a", f"tinker:{tmp_path}/b")
    assert finding.stage == "learning rate"
    assert "learning_rate is 0.0001 in A" in str(finding.causes)
    formulas = {
        x["groups"]
        for x in fitting_settings("advantages", Step.of(open_side(str(tmp_path / "a")), 1))
    }
    assert formulas == {"as recorded"}
