"""The cost of `trainer.record=all`: steps with and without it alternate in one run.

python -m pytest tests/trainer/observers/test_recorded_steps.py -m slow -s
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.observers.alarms import Alarms
from trainer.observers.saved_batches import RecordedSteps
from workers.training.engine import TrainEngine

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
CLOCKS = (time.perf_counter, time.process_time)
NUM_STEPS = 42


@pytest.mark.slow
def test_a_record_costs_at_most_3_percent_of_the_speed_guard_s_grpo_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "grpo_side", raising=False)
    import grpo_side

    begins: list[list[float]] = []
    take_step = TrainEngine.optim_step

    def is_recorded() -> bool:
        return len(begins) % 2 == 0

    def begin(self: Alarms, *arguments: Any) -> None:
        begins.append([clock() for clock in CLOCKS])

    def optim_step(self: TrainEngine, *arguments: Any, **settings: Any) -> Any:
        self.gradient_norms = {} if is_recorded() else None
        return take_step(self, *arguments, **settings)

    def only_if_recorded(hook: Any) -> Any:
        def call(*arguments: Any) -> None:
            if is_recorded():
                hook(*arguments)

        return call

    monkeypatch.setattr(Alarms, "on_step_begin", begin, raising=False)
    monkeypatch.setattr(TrainEngine, "optim_step", optim_step)
    for name in ("on_update", "on_step_end"):
        monkeypatch.setattr(RecordedSteps, name, only_if_recorded(getattr(RecordedSteps, name)))
    grpo_side.make(tmp_path)
    grpo_side.ours(tmp_path, "fixed", NUM_STEPS, 1, "auto", "trainer.record=all")
    for number, name in enumerate(("wall", "CPU")):
        seconds = [
            after[number] - before[number]
            for before, after in zip(begins[1:], begins[2:], strict=False)
        ]
        ratios = [seconds[n] / ((seconds[n - 1] + seconds[n + 1]) / 2) for n in range(2, 39, 2)]
        ratio, step = statistics.median(ratios), statistics.median(seconds)
        print(f"\n{name} time of a step: {step:.3f} s; recorded / not recorded: {ratio:.4f}")
    assert ratio < 1.03, "CPU time"
