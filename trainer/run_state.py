"""A run and its recipe: the state that loop and stages share, and what is done around the stages.

    run = Run(config, groups)
    trainer = MyTrainer(run, *inputs)
    with run.clock("update"):
        ...                           # run.timing["update"], and the calls that ended within

A `RunRecipe` prepares and prints things around its stages, and says what reports show:

    class SFTTrainer(RowTrainer[LMRow]):
        recipe = RunRecipe(role="sft", stages=("data", "update"), describe=describe, ...)

`trainer.config.schema.Recipe` is the recipe as the configuration sees it. The stages, which users
subclass, are a `trainer.loop.Trainer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import RunConfig
from trainer.groups.worker_groups import WorkerGroups, worker_class
from trainer.observers.alarms import AlarmRule
from trainer.recovery import Restarts
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


@dataclass(frozen=True)
class RunRecipe:
    """A recipe as runs and reports see it, without the code of its stages.

    Example:

        RunRecipe(role="sft", stages=("data", "update"))

    Args:
        role: the role whose model the run trains and exports, if any.
        stages: the stages of a step in order, as `clock` names them; reports show their times.
        concurrent_stages: stages that launch several calls concurrently; the overlap is a metric.
        repeatable_stages: stages that run again after a lost group was replaced.
        call_labels: method -> the name of its time among the metrics, if it differs.
        alarm_rules: the rules that raise alarms on metrics.
        prepare: prepares the data and other inputs before processes start, and registers cleanup.
            It raises if the run cannot work. It returns the arguments of the trainer after `run`.
        resolve: returns the configuration with values that depend on files and devices.
        worker_code: returns the names and dotted paths of code that workers use.
        check_columns: checks the columns of our stages, which a user's stages may add to.
        describe: returns paragraphs about a step (a few lines if `brief`) of a trainer's class, to
            print with the placement: `describe(config, trainer_cls, brief)`.
        stub_inputs: returns what `prepare` would return, for a step on stubs (`trainer.stubs`):
            `stub_inputs(trainer_cls, config, groups)`.
        describe_inputs: returns the lines that a dry run prints about the inputs of `prepare`.
        headline: returns a step's numbers for the console; if none, it shows the first metrics.
        sample_metrics: returns the metrics of a step's samples, if steps train on samples that they
            generate; the sample log then tracks these.
    """

    role: str = ""
    stages: Sequence[str] = ()
    concurrent_stages: Sequence[str] = ()
    repeatable_stages: Sequence[str] = ()
    call_labels: Mapping[str, str] | None = None
    alarm_rules: Sequence[AlarmRule] = ()
    prepare: Callable[[Any, ExitStack], tuple[Any, ...]] = lambda config, at_end: ()
    resolve: Callable[[Any], Any] = lambda config: config
    worker_code: Callable[[Any], list[str]] = lambda config: list(config.role_workers.values())
    check_columns: Callable[[Any], None] = lambda config: None
    describe: Callable[[Any, type, bool], list[str]] = lambda *_: []
    stub_inputs: Callable[[Any, Any, Any], tuple[Any, ...]] = lambda *_: ()
    describe_inputs: Callable[..., list[str]] = lambda config, *inputs: []
    headline: Callable[[Mapping[str, float]], Sequence[str]] = lambda metrics: ()
    sample_metrics: Callable[..., dict[str, float]] | None = None

    def exports_model(self, config: Any) -> bool:
        """Return whether the run trains a model that it can save in its folder."""
        return bool(self.role) and hasattr(worker_class(config, self.role), "export_model")
