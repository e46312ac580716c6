"""`Trainer`, the base class of trainers, and the loop around its steps, which all of them share.

Each recipe has a subclass of `Trainer`, such as `PPOTrainer`; `trainer.launch.run` drives it:

    inputs = MyTrainer.prepare(config, at_end)        # data and the like; rejects what cannot work
    with WorkerGroups(config, MyTrainer.recipe.worker_code(config)) as groups:
        Loop(MyTrainer(Run(config, groups), *inputs)).run()

A subclass must define `total_steps` and `step`. Everything else has a default. `Trainer.recipe` has
what is prepared and printed around the stages. The loop knows no role names, batches or tokenizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from trainer.groups.worker_groups import WorkerGroups
from trainer.hooks import Hooks
from trainer.recovery import Recovery, leave_drained_nodes
from trainer.run_folder.folder import saved_steps
from trainer.run_folder.metrics import describe_reached_target
from trainer.run_folder.resume import IS_LAST
from trainer.run_folder.timeline import Timeline, call_timings
from trainer.run_folder.tracking import Tracking, make_tracking
from trainer.run_state import Call, Metrics, Run, RunRecipe
from verl_like.batch.protocol import DataProto
from verl_like.process.garbage import ignore_old_objects
from workers.columns import select_reads

Result = TypeVar("Result")
STEP = "global_step"
"""The key of the step in a checkpoint's driver state."""


class EndOfSamples(Exception):
    """Raised if there is no data for the current step: the run ends with the previous step."""


class StopRequested(Exception):
    """Raised if the run must stop while a step waits for something that may never come."""


class Trainer(Hooks, ABC):
    """Base class of the trainers: preparation before processes start, the step, and its state.

    Example:

        class Noop(Trainer):
            total_steps = 3

            def step(self):
                with self.clock("update"):
                    return {"train/loss": 0.0}

    Attributes:
        config: the configuration of the run.
        groups: role -> the worker group with its methods.
        folder: the run folder.
        global_step: number of the current step, or of the last one.
        run: the state that the loop and the stages share (`trainer.run_state.Run`).
    """

    recipe: ClassVar[RunRecipe] = RunRecipe()
    """The preparation and texts around the stages, and the figures of reports."""
    has_validation = False
    """True if there is data to validate on."""
    origins: Any = None
    """Where samples of an asynchronous run come from, for the observers
    (`trainer.async_training.origins`).
    """

    def __init__(self, run: Run, send_weights: Callable[[], Any] = lambda: None) -> None:
        """Store the run; the loop loads the models. `send_weights` updates a replaced rollout."""
        self.run: Run = run
        self.config: Any = run.config
        self.groups: WorkerGroups = run.groups
        self.folder = run.folder
        self.recovery = Recovery(self, send_weights)

    @classmethod
    def prepare(cls, config: Any, at_end: ExitStack) -> tuple[Any, ...]:
        """Return the constructor arguments after `run`, such as data, before the workers start.

        Args:
            config: the configuration of the run; raise if the run cannot work.
            at_end: register cleanup here.
        """
        return cls.recipe.prepare(config, at_end)

    @classmethod
    def headline(cls, metrics: Mapping[str, float]) -> Sequence[str]:
        """Return a step's numbers for the console; if empty, it shows the first metrics instead."""
        return cls.recipe.headline(metrics)

    # -------------------------------------------------------------------------------- the step

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Steps of the whole run."""

    @abstractmethod
    def step(self) -> Metrics:
        """Run one step, with its stages in `clock` or `stage`; return the metrics."""

    @property
    def global_step(self) -> int:
        """Number of the current step, or of the last one."""
        return self.run.step

    def clock(self, stage: str) -> AbstractContextManager[None]:
        """Measure the wall time of a stage, `timing_s/<stage>`, and collect its calls.

        Example:

            with self.clock("update"):
                ...
        """
        return self.run.clock(stage, self.stage_of)

    def stage(
        self, name: str, stage: Callable[..., Result], batch: DataProto | None = None
    ) -> Result:
        """Run and time a stage and its hooks; a stage that takes a batch gets `batch`."""
        inputs = () if batch is None else (batch,)
        with self.clock(name):
            self.call_hook("on_stage_begin", name, batch)
            result = self.recovery.stage(name, stage, *inputs)
            self.call_hook("on_stage_end", name, result)
        return result

    def stage_of(self, call: Call, ended_in: str) -> str:
        """Return the stage of a finished call, by default the stage in which it ended."""
        return ended_in

    def call(
        self, role: str, method: str, batch: DataProto, *others: DataProto, **settings: Any
    ) -> Any:
        """Call a role's method with the columns that it reads, and return the future.

        `settings` travel in the batch's meta_info; batches in `others` are passed unchanged.
        """
        group = self.groups[role]
        sent = select_reads(batch, group.roles[role], method)
        if settings:
            sent = sent.select()
            sent.meta_info = sent.meta_info | settings
        return getattr(group, method).remote(sent, *others)

    # ------------------------------------------------------------- models, validation and state

    def init_arguments(self, role: str) -> dict[str, Any]:
        """Return the arguments of the role's `init_model`."""
        return {}

    def before_resume(self) -> None:
        """Called once the models are built, before a checkpoint is loaded."""

    def before_steps(self) -> None:
        """Called once the models have their weights, before the first step or validation."""

    def replaceable_roles(self) -> frozenset[str]:
        """Return the roles that can be restarted without a checkpoint."""
        return frozenset()

    def saved_groups(self) -> dict[str, Any]:
        """Return the groups whose roles have state for a checkpoint."""
        return {role: self.groups[role] for role in self.groups}

    @property
    def can_save(self) -> bool:
        """True if a timer or a signal may trigger a checkpoint after this step."""
        return True

    def validation_metrics(self) -> Metrics:
        """Return the metrics of one validation."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the recipe's own state on the driver, as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`; `global_step` has the restored step already."""


class Loop:
    """One attempt of a run: steps, checkpoints, validations, tracking and the end."""

    def __init__(self, trainer: Trainer, saves_model: bool = True) -> None:
        """With `saves_model`, the trained model is saved at the end, if the settings say so."""
        self.trainer = trainer
        self._saves_model = saves_model and trainer.recipe.exports_model(trainer.config)
        self.leaving: set[str] = set()
        """Pools on drained nodes for which no other node had room."""

    def run(self) -> None:
        """Run every step."""
        trainer, run = self.trainer, self.trainer.run
        run.checkpoints.resume.discard_later_steps()
        with make_tracking(run.config, trainer.total_steps, trainer.headline) as tracking:
            resumes = run.checkpoints.resume.resumes_in_place
            timeline = Timeline(run.folder / "timeline.json", resumes, trainer.recipe.stages)
            try:
                self.start(tracking, timeline)
                with run.stop.deferred(), ignore_old_objects():
                    reached = ""
                    while not reached and run.step < trainer.total_steps:
                        if run.stop.received and trainer.can_save:
                            self._stop_here()
                        leave_drained_nodes(self)
                        reached = self._next_step(tracking, timeline)
                    self._finish_checkpoint()
                    ending = [reached, self._save_final_model()]
            finally:
                run.checkpoints.close()
                timeline.add(run.take_calls())
                trainer.call_hook("on_train_end")
        for line in filter(None, ending):  # after the line of the last step
            print(line, flush=True)

    def start(self, tracking: Tracking, timeline: Timeline) -> None:
        """Build the models, resume, and validate if that comes before the first step."""
        trainer, run = self.trainer, self.trainer.run
        with trainer.clock("init"):
            self.init_models()
        start = run.checkpoints.resume.start
        run.restarts.begin(run.step, "the beginning" if start is None else start.name)
        trainer.call_hook("on_init_end")
        trainer.call_hook("on_train_begin")
        scores = self._validate(is_last=False) if run.step == 0 else {}
        if scores:
            tracking.log(scores, 0)
        timeline.add(run.take_calls())  # so that they do not count in the first step

    def init_models(self) -> None:
        """Build the models of roles that have none; load a checkpoint if there is one."""
        trainer, run = self.trainer, self.trainer.run
        if run.config.trainer.max_restarts:
            run.groups.may_be_replaced(trainer.replaceable_roles())
        run.groups.init_new_roles(trainer.init_arguments)
        trainer.before_resume()
        state = run.checkpoints.resume.load(trainer.saved_groups())
        if state is not None:
            with run.checkpoints.resume.naming_checkpoint():
                run.step = state[STEP]
                trainer.load_state_dict(state)
                for observer in stateful(run.observers):
                    observer.load_state_dict(state.get(observer.name, {}))
        trainer.before_steps()

    def _next_step(self, tracking: Tracking, timeline: Timeline) -> str:
        """Run a step, save and log it; return why the run ends with it, or ""."""
        trainer, run = self.trainer, self.trainer.run
        run.step += 1
        run.groups.check_idle(f"the start of step {run.step}")
        try:
            metrics = self._step()
        except EndOfSamples as end:
            run.step -= 1
            self._save(is_last=True)
            self._commit()
            return f"the run ends after step {run.step}: {end}"
        except StopRequested as waiting:
            run.step -= 1
            if trainer.can_save:
                self._stop_here()
            run.stop.end(f"while it waited for {waiting}")
            raise
        reached = describe_reached_target(metrics, run.config.trainer.stop_at) or run.end_reason
        try:
            metrics |= self._save(is_last=bool(reached))
        finally:
            timeline.add(run.take_calls())
            tracking.log(metrics, run.step, is_last=bool(reached))
        self._commit()  # only now: a resume needs the line of the step that it starts from
        return reached

    def _step(self) -> Metrics:
        """Run one step between its hooks, and measure its times by stage and by role."""
        trainer, run = self.trainer, self.trainer.run
        run.timing = {}
        trainer.call_hook("on_step_begin")
        with trainer.clock("step"):
            metrics = trainer.step()
        recipe = trainer.recipe
        concurrent, labels = recipe.concurrent_stages, recipe.call_labels
        metrics |= call_timings(run.calls, run.timing, concurrent, labels)
        # the run ends with this step, as far as metrics before a validation say
        targets = run.config.trainer.stop_at
        known = {name: targets[name] for name in targets if name in metrics}
        reached = bool(describe_reached_target(metrics, known))
        metrics |= self._validate(is_last=reached or run.step == trainer.total_steps)
        trainer.call_hook("on_step_end", metrics)
        return metrics

    def _validate(self, is_last: bool) -> Metrics:
        """Return the metrics of a validation, if one is due after this step."""
        trainer = self.trainer
        if not (trainer.has_validation and self._validation_is_due(is_last)):
            return {}
        trainer.call_hook("on_validate_begin")
        with trainer.clock("testing"):
            metrics = trainer.validation_metrics()
        metrics["timing_s/testing"] = self.trainer.run.timing["testing"]
        trainer.call_hook("on_validate_end", metrics)
        return metrics

    def _validation_is_due(self, is_last: bool) -> bool:
        """Return whether the settings have a validation after this step, or before the first."""
        settings, step = self.trainer.config.trainer, self.trainer.global_step
        if step == 0:
            return bool(settings.val_before_train)
        if is_last:
            return bool(settings.test_freq >= 0)
        return bool(settings.test_freq > 0 and step % settings.test_freq == 0)

    def _save(self, is_last: bool = False, at_once: bool = False) -> Metrics:
        """Write a checkpoint if one is due after this step, or `at_once`; return its time."""
        trainer, run = self.trainer, self.trainer.run
        checkpoints, step = run.checkpoints, run.step
        last_step = step if is_last else trainer.total_steps
        if not (checkpoints.is_due(step, last_step, by_time=trainer.can_save) or at_once):
            return {}
        with trainer.clock("save_checkpoint"):
            state = {STEP: step, **trainer.state_dict(), IS_LAST: step == last_step}
            for observer in stateful(run.observers):
                observer_state = observer.state_dict()
                if observer_state:
                    state[observer.name] = observer_state
            checkpoints.write(step, trainer.saved_groups(), state, self._write_files)
        return {"timing_s/save_checkpoint": run.timing["save_checkpoint"]}

    def _write_files(self, folder: Path) -> None:
        """Write the observers' files of a checkpoint."""
        for observer in self.trainer.run.observers:
            if hasattr(observer, "write_files"):
                observer.write_files(folder)

    def _commit(self) -> None:
        """Commit the written checkpoint, perhaps in the background."""
        for folder in self.trainer.run.checkpoints.commit():
            self.trainer.call_hook("on_save_end", folder)

    def _finish_checkpoint(self) -> None:
        self.trainer.run.checkpoints.finish()
        self._commit()

    def save_now(self) -> Path:
        """Write and commit a checkpoint of the last step unless there is one; return its folder."""
        self._finish_checkpoint()
        run = self.trainer.run
        folder = run.folder / f"global_step_{run.step}"
        if run.step > 0 and not folder.is_dir():
            self._save(at_once=True)
            self._commit()
            self._finish_checkpoint()
        return folder

    def _stop_here(self) -> None:
        """End the run with a checkpoint of its last step."""
        run = self.trainer.run
        where = f"after step {run.step} of {self.trainer.total_steps}"
        if not run.checkpoints.is_enabled:
            self._finish_checkpoint()
            run.stop.end(f"{where}, without a checkpoint (trainer.save_every_minutes=null)")
        folder = self.save_now()
        run.stop.end(f"{where}, saved in {folder}" if folder.is_dir() else where)

    def _save_final_model(self) -> str:
        """Save the trained model in the run folder if configured; return what to say about it."""
        run = self.trainer.run
        if not self._saves_model:
            return ""
        if run.config.trainer.save_final:
            group = run.groups[self.trainer.recipe.role]
            folder = run.checkpoints.write_model(run.step, group)
            return f"model: {Path(run.config.trainer.default_local_dir) / folder.name}"
        if not saved_steps(run.folder):
            return "warning: no model was saved (trainer.save_final=false, no checkpoint)"
        return ""


def stateful(observers: Sequence[Any]) -> list[Any]:
    """Return the observers whose state goes into checkpoints, under their `name`."""
    return [observer for observer in observers if hasattr(observer, "state_dict")]
