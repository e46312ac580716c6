"""A run goes on from what the driver remembers of a step's beginning."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.recipes.regression import REGRESSION
from trainer import load_config
from trainer.run_folder.checkpoint import Checkpoints
from trainer.run_folder.step_start import SavedReplicas, StepStart


def test_state_and_random_numbers_are_those_of_the_beginning() -> None:
    state = {"global_step": 4, "loader": {"num_taken": 5}}
    start = StepStart.after(4, state)
    drawn = random.random()
    state["loader"]["num_taken"] = 6
    assert start.restore({}) == {"global_step": 4, "loader": {"num_taken": 5}}
    assert random.random() == drawn


class Role:
    """A group whose calls are made at once."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.load_checkpoint = self

    def remote(self, path: str) -> Role:
        assert Path(path).is_dir()
        self.loaded.append(Path(path).name)
        return self

    def get(self, timeout: float | None = None) -> None:
        pass


def test_what_ranks_have_written_of_roles_is_loaded_and_goes(tmp_path: Path) -> None:
    (tmp_path / "replicas" / "actor").mkdir(parents=True)
    groups = {"actor": Role(), "critic": Role()}
    start = StepStart.after(4, {"global_step": 4})
    assert start.source == "the processes that live"

    saved = SavedReplicas(tmp_path / "replicas", {"actor": [1]})
    start = replace(start, replicas=saved)
    assert start.source == "actor rank 1"
    assert start.restore(groups) == {"global_step": 4}
    assert (groups["actor"].loaded, groups["critic"].loaded) == (["actor"], [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("last_step", "kept"), [(2, [0, 1, 2]), (0, [])])
def test_lines_of_steps_that_are_made_again_go(
    tmp_path: Path, last_step: int, kept: list[int]
) -> None:
    """Before the first step the run begins anew, with its validation."""
    lines = tmp_path / "metrics.jsonl"
    lines.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(4)))
    settings = ["trainer.total_training_steps=6", f"trainer.default_local_dir={tmp_path}"]
    checkpoints = Checkpoints(load_config([*settings, "trainer.logger=[]"], REGRESSION))
    checkpoints.go_on_from(StepStart.after(last_step, {"global_step": last_step}))
    checkpoints.cut_back()
    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == kept
    assert checkpoints.load({}) == {"global_step": last_step}
