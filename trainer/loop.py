"""The loop of a run, whatever it trains: steps, clock, hooks, checkpoints, tracking, timeline, end.

A recipe (`trainer.ppo` is one) is a subclass of `Trainer`; `trainer.launch.run` drives it:

    inputs = MyTrainer.prepare(config, at_end)        # data and the like; refuses what cannot work
    with WorkerGroups(config, MyTrainer.worker_code(config)) as groups:
        MyTrainer(config, groups, *inputs).fit()

A recipe has to say `total_steps` and `step`; it may add to what is initialised, validated, saved
and printed. Role names, batches and tokenizers are its own matter.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from trainer.alarms import AlarmRule, Alarms
from trainer.chaos import Chaos, Fault
from trainer.config.schema import RunConfig
from trainer.groups.worker_groups import WorkerGroups, worker_class
from trainer.hooks import Hooks, check_callbacks
from trainer.restarts import Restarts, replace_within_step
from trainer.run_folder.checkpoint import IS_LAST, Checkpoints
from trainer.run_folder.marker import committed
from trainer.run_folder.signals import StopSignals
from trainer.run_folder.stopping import reached_goal
from trainer.run_folder.timeline import Timeline, call_timings
from trainer.run_folder.tracking import Tracking, make_tracking
from verl_like.calls.future import gather
from verl_like.errors import WorkerDiedError
from verl_like.process.garbage import old_objects_kept

Metrics = dict[str, float]
Result = TypeVar("Result")
IN_BACKGROUND = ("write_checkpoint", "hurry_checkpoint")
"""Calls that are of no stage of the step in which they end."""


class Trainer(Hooks, ABC):
    """Drives the roles in `groups` through the steps of a recipe."""

    config: RunConfig
    stages: ClassVar[Sequence[str]] = ()
    """What follows each other in a step, as `clock` calls it: the report shows each one's share."""
    concurrent_stages: ClassVar[Sequence[str]] = ()
    """Stages that launch several calls at once: how much these overlapped becomes a metric."""
    role: ClassVar[str] = ""
    """The role whose model a run is about, if there is one: a checkpoint's export is its."""
    call_labels: ClassVar[Mapping[str, str]] = {}
    """Method -> what its time is called among the metrics, where that is not the method's name."""
    alarm_rules: ClassVar[Sequence[AlarmRule]] = ()
    """What of a step's metrics is an alarm: the numbers, their bands and the words."""

    def __init__(self, config: RunConfig, groups: WorkerGroups) -> None:
        """No model is loaded before `fit`."""
        self.config = config
        self.groups = groups
        self.folder = Path(config.trainer.default_local_dir)
        self.checkpoints = Checkpoints(config)
        self.alarms = Alarms(self.alarm_rules)
        """Of the run; of `trainer.launch`, whose attempts share one."""
        self.stop = StopSignals()
        """Signals that ask the run to stop; `trainer.launch` catches them."""
        self.chaos = Chaos(config)
        """Faults on purpose; of `trainer.launch`, whose attempts share one."""
        self.restarts = Restarts(config)
        """Of the run; of `trainer.launch`, whose attempts share one."""
        self.global_step = 0
        self.timing: Metrics = {}
        self.calls: list[dict[str, Any]] = []

    # --------------------------------------------------------------- what a recipe says of itself

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Steps of the whole run."""

    @abstractmethod
    def step(self) -> Metrics:
        """One step, its stages timed by `clock`; gives the metrics."""

    @classmethod
    def wrote_all(cls, config: Any) -> bool:
        """Whether a run whose last step is saved has nothing to write after it."""
        return True

    @classmethod
    def check_code(cls, config: Any, callbacks: Sequence[object]) -> None:
        """Refuse code of the user's that would fail within a step; nothing is read yet."""
        check_callbacks(callbacks)

    @classmethod
    def prepare(cls, config: Any, at_end: ExitStack) -> tuple[Any, ...]:
        """What the constructor takes after `config` and `groups`, made before a process starts.

        What cannot work is refused here. What must be closed goes on the stack `at_end`.
        """
        return ()

    @classmethod
    def look_at(cls, config: Any, *inputs: Any) -> list[str]:
        """Lines of a dry run about what `prepare` has made; what shows no earlier is refused."""
        return []

    @classmethod
    def worker_code(cls, config: Any) -> list[str]:
        """Dotted paths in the configuration that worker processes import."""
        return list(config.role_workers.values())

    @classmethod
    def leaves_model(cls, config: Any) -> bool:
        """Whether there is a trained model that a run can leave."""
        return bool(cls.role) and hasattr(worker_class(config, cls.role), "export_model")

    @classmethod
    def describe(
        cls, config: Any, max_columns: int | None = None, brief: bool = False
    ) -> list[str]:
        """Paragraphs about a step, or few lines, printed under the placement before it starts."""
        return []

    @classmethod
    def headline(cls, metrics: Mapping[str, float]) -> Sequence[str]:
        """The few numbers of a step that the console shows; with none, the first of its metrics."""
        return ()

    def init_arguments(self, role: str) -> dict[str, Any]:
        """Arguments of the role's `init_model`."""
        return {}

    def replaceable_roles(self) -> frozenset[str]:
        """Roles that go on when they are started anew, without a checkpoint."""
        return frozenset()

    def saved_groups(self) -> dict[str, Any]:
        """The groups whose roles have something to keep in a checkpoint."""
        return {role: self.groups[role] for role in self.groups}

    def own_faults(self) -> list[Fault]:
        """Faults on purpose that other recipes cannot have (`trainer.chaos`)."""
        return []

    @property
    def has_validation(self) -> bool:
        """Whether there is anything to validate on."""
        return False

    def validation_metrics(self) -> Metrics:
        """Metrics of one validation."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the driver itself needs to go on, as JSON has it."""
        alarms = {"alarms": self.alarms.state_dict()} if self.alarm_rules else {}
        return {"global_step": self.global_step, **alarms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.global_step = state["global_step"]
        if self.alarm_rules:
            self.alarms.load_state_dict(state.get("alarms", {}))

    def write_more(self, folder: Path) -> None:
        """Files of a checkpoint that `state_dict`, which was asked for just before, has no room
        for.
        """

    def close(self) -> None:
        """End what the recipe itself has under way; called once, after the last step."""

    # ------------------------------------------------------------------------------------ the loop

    def fit(self) -> None:
        """Every step of the run."""
        self.checkpoints.cut_back()
        with make_tracking(self.config, self.total_steps, self.headline) as tracking:
            resume = self.checkpoints.goes_on_here
            timeline = Timeline(self.folder / "timeline.json", resume, self.stages)
            try:
                self._start(tracking, timeline)
                with self.stop.held(), old_objects_kept():
                    reached = self._steps(tracking, timeline)
                    self._finish_checkpoint()
                    self._leave_model()
                if reached:
                    print(reached, flush=True)
            finally:
                self.checkpoints.close()
                self.close()
                timeline.add(self.take_calls())
                self.call_hook("on_train_end")

    def _start(self, tracking: Tracking, timeline: Timeline) -> None:
        """Models, a resume, and the validation before the first step."""
        with self.clock("init"):
            self.init_models()
        start = self.checkpoints.start
        self.restarts.begin(self.global_step, "the beginning" if start is None else start.name)
        self.chaos.begin_attempt(self.global_step)
        self.call_hook("on_init_end")

        self.call_hook("on_train_begin")
        if self.global_step == 0 and (scores := self.validate()):
            tracking.log(scores, 0)
        timeline.add(self.take_calls())  # or the first step's times would begin with these

    def _steps(self, tracking: Tracking, timeline: Timeline) -> str:
        """Step after step; gives the goal that one has reached, if that ends the run.

        Asked to stop, the run saves what the last step left, and ends by `RunStopped`.
        """
        reached = ""
        while not reached and self.global_step < self.total_steps:
            if self.stop.received and self.can_save:
                self._stop_here()
            reached = self._next_step(tracking, timeline)
        return reached

    def _stop_here(self) -> None:
        """The run ends with a checkpoint of its last step, and goes on from there."""
        self._finish_checkpoint()
        where = f"after step {self.global_step} of {self.total_steps}"
        if not self.checkpoints.are_written:
            self.stop.end(f"{where}, without a checkpoint (trainer.save_every_minutes=null)")
        folder = self.folder / f"global_step_{self.global_step}"
        if self.global_step > 0 and not folder.is_dir():
            self.save(at_once=True)
            self._commit()
            self._finish_checkpoint()
        self.stop.end(f"{where}, saved in {folder}" if folder.is_dir() else where)

    def _next_step(self, tracking: Tracking, timeline: Timeline) -> str:
        """A step, its checkpoint and its line of metrics; gives the goal that it reached."""
        self.global_step += 1
        self.groups.check_idle(f"the start of step {self.global_step}")
        metrics = self.timed_step()
        self.alarms.check(metrics, self.global_step)
        reached = reached_goal(metrics, self.config.trainer.stop_at)
        try:
            metrics |= self.save(is_last=bool(reached))
        finally:
            timeline.add(self.take_calls())
            tracking.log(metrics, self.global_step)

        # only now: a resume finds the line of the step that it goes on from
        self._commit()
        return reached

    def _commit(self) -> None:
        """What was written, if anything was, becomes a checkpoint, perhaps in the background."""
        for folder in self.checkpoints.commit():
            self.call_hook("on_save_end", folder)

    def _leave_model(self) -> None:
        """Put the trained model into the run folder, if it is asked for; says where it is."""
        if not self.leaves_model(self.config):
            return
        if self.config.trainer.save_final:
            folder = self.checkpoints.write_model(self.global_step, self.groups[self.role])
            print(f"model: {folder}", flush=True)
        elif not committed(self.folder):
            print("NO MODEL is left: trainer.save_final=false, and no checkpoint", flush=True)

    def _finish_checkpoint(self) -> None:
        """The last checkpoint is committed."""
        self.checkpoints.finish()
        self._commit()

    def can_replace(self, role: str) -> bool:
        """Whether this role's group can be replaced in the middle of a step, if it is lost now."""
        is_replaceable = self.groups[role].transport.is_replaceable
        return is_replaceable and self.restarts.are_left(self.global_step)

    def once_more_if_lost(self, stage: Callable[..., Result], *args: Any) -> Result:
        """What a stage gives that can be made again: the second time where it has lost a group that
        was replaced.
        """
        try:
            return stage(*args)
        except WorkerDiedError as error:
            if not any(map(self.can_replace, self.groups)):
                raise
            self.replace_lost(error)
            return stage(*args)

    def replace_lost(self, error: WorkerDiedError) -> None:
        """Replace what is lost in the middle of a step; raises the error where that cannot be.

        The new roles have the models of their folders.
        """
        roles = self.replaceable_roles()
        replace_within_step(self.groups, roles, self.restarts, error, self.global_step)
        self.init_new_roles()

    def init_models(self) -> None:
        """Build the models of roles that have none; go on from a checkpoint if there is one."""
        if self.config.trainer.max_restarts:
            self.groups.may_be_replaced(self.replaceable_roles())
        self.init_new_roles()
        self.resume()

    def init_new_roles(self) -> None:
        """Build the models of roles that have none, all at once."""
        taken = self.groups.take_new_roles()
        new = [role for role in self.groups if role in taken]
        gather(*(self.groups[role].init_model.remote(**self.init_arguments(role)) for role in new))

    def timed_step(self) -> Metrics:
        """One step between its hooks, with its times by stage and by role."""
        self.timing = {}
        self.call_hook("on_step_begin")
        self.chaos.before_step(self.groups, self.global_step, self.own_faults())
        with self.clock("step"):
            metrics = self.step()
        metrics |= call_timings(self.calls, self.timing, self.concurrent_stages, self.call_labels)
        metrics |= self.validate()
        self.call_hook("on_step_end", metrics)
        return metrics

    # ---------------------------------------------------------------------------------- validation

    def validate(self) -> Metrics:
        """Metrics of a validation, if one is due after this step (0: before the first)."""
        if not self.validation_is_due():
            return {}

        self.call_hook("on_validate_begin")
        with self.clock("testing"):
            metrics = self.validation_metrics()
        metrics["timing_s/testing"] = self.timing["testing"]
        self.call_hook("on_validate_end", metrics)
        return metrics

    def validation_is_due(self) -> bool:
        """Whether one is asked for after this step; step 0 is before the first."""
        settings = self.config.trainer
        if not self.has_validation:
            return False
        if self.global_step == 0:
            return settings.val_before_train
        is_last = self.global_step == self.total_steps
        return settings.test_freq > 0 and (self.global_step % settings.test_freq == 0 or is_last)

    # --------------------------------------------------------------------------------- checkpoints

    @property
    def can_save(self) -> bool:
        """Whether a checkpoint that time or a signal asks for may be that of this step."""
        return True

    def save(self, is_last: bool = False, at_once: bool = False) -> Metrics:
        """Write all roles and the driver, if a checkpoint is due after this step; gives its time.

        `at_once` writes it in any case. `fit` commits it.
        """
        last_step = self.global_step if is_last else self.total_steps
        is_due = self.checkpoints.is_due(self.global_step, last_step, by_time=self.can_save)
        if not (is_due or at_once):
            return {}
        with self.clock("save_checkpoint"):
            state = self.state_dict() | {IS_LAST: self.global_step == last_step}
            self.checkpoints.write(self.global_step, self.saved_groups(), state, self.write_more)
        return {"timing_s/save_checkpoint": self.timing["save_checkpoint"]}

    def resume(self) -> None:
        """Go on from the checkpoint that `trainer.resume_mode` chose, if there is one."""
        state = self.checkpoints.load(self.saved_groups())
        if state is not None:
            with self.checkpoints.naming_what_does_not_load():
                self.load_state_dict(state)

    # --------------------------------------------------------------------------------------- clock

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Wall time of a stage, as `timing_s/<stage>`.

        The calls that finished in it become the stage's.
        """
        began = time.perf_counter()
        try:
            yield
        finally:
            self.timing[stage] = time.perf_counter() - began
            for call in self.groups.take_calls():
                is_saved = call["method"] in IN_BACKGROUND
                of_stage = "save_checkpoint" if is_saved else self.stage_of(call, stage)
                self.calls.append(call | {"stage": of_stage, "step": self.global_step})

    def stage_of(self, call: Mapping[str, Any], ended_in: str) -> str:
        """The stage that a finished call belongs to: that in which it ended."""
        return ended_in

    def take_calls(self) -> list[dict[str, Any]]:
        """The workers' calls since the last time, each with its stage and step."""
        calls, self.calls = self.calls, []
        return calls
