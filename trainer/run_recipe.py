"""A recipe as a run sees it: what is prepared and printed around its stages, and what reports show.

    class SFTTrainer(RowTrainer[LMRow]):
        recipe = RunRecipe(role="sft", stages=("data", "update"), describe=describe, ...)

`trainer.config.recipe.Recipe` is the recipe as the configuration sees it. The stages, which users
subclass, are a `trainer.loop.Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from trainer.groups.worker_groups import worker_class
from trainer.observers.alarms import AlarmRule


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
