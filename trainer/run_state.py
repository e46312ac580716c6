"""`Run`: the state that the loop and the stages of a run share, in every recipe.

Example:

    run = Run(config, groups)
    trainer = MyTrainer(run, *inputs)
    with run.clock("update"):
        ...                           # run.timing["update"], and the calls that ended within
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config.schema import RunConfig
from trainer.groups.worker_groups import WorkerGroups
from trainer.restarts import Restarts
from trainer.run_folder.checkpoint import Checkpoints
from trainer.run_folder.signals import StopSignals

Metrics = dict[str, float]
Call = Mapping[str, Any]
IN_BACKGROUND = ("write_checkpoint", "hurry_checkpoint")
"""Calls that belong to no stage of the step in which they finish."""


class Run:
    """Configuration, worker groups, folder, checkpoints, clock and observers of one attempt."""

    def __init__(
        self,
        config: RunConfig,
        groups: WorkerGroups,
        observers: Sequence[object] = (),
        callbacks: Sequence[object] = (),
        stop: StopSignals | None = None,
        restarts: Restarts | None = None,
    ) -> None:
        """`observers` are objects of `trainer.observers`, `callbacks` the user's objects."""
        self.config, self.groups = config, groups
        self.folder = Path(config.trainer.default_local_dir)
        self.checkpoints = Checkpoints(config)
        self.observers, self.callbacks = observers, callbacks
        self.stop = stop or StopSignals()
        self.restarts = restarts or Restarts(config)
        self.step = 0
        """Number of the current step, or of the last one."""
        self.end_reason = ""
        """Why the run ends with the current step, if it does."""
        self.timing: Metrics = {}
        """Stage -> seconds in this step."""
        self.calls: list[dict[str, Any]] = []
        """The workers' calls since `take_calls`."""

    def add_observer(self, observer: object) -> None:
        """Call the hooks of a further observer, after the other observers' hooks."""
        self.observers = [*self.observers, observer]

    @contextmanager
    def clock(
        self, stage: str, stage_of: Callable[[Call, str], str] = lambda call, stage: stage
    ) -> Iterator[None]:
        """Time a stage. Its calls are those that end in it; `stage_of` may name another stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timing[stage] = time.perf_counter() - start
            for call in self.groups.take_calls():
                is_saved = call["method"] in IN_BACKGROUND
                if call["method"] == "write_checkpoint":
                    self.checkpoints.took_s["write"] = call["end"] - call["start"]
                name = "save_checkpoint" if is_saved else stage_of(call, stage)
                self.calls.append(call | {"stage": name, "step": self.step})

    def take_calls(self) -> list[dict[str, Any]]:
        """Return the new calls of workers, with stage and step, and forget them."""
        calls, self.calls = self.calls, []
        return calls
