"""Start a run of any recipe: first all checks, then the processes.

`run(config)` executes a complete run, for commands and for `trainer.api`.

`check(config)` runs all checks that precede the first process, then stops (`verl-like check`). With
`trainer.dry_run` it reads only the first rows of large files (`trainer.data.files.row_limit`).
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.config.devices import run_devices
from trainer.config.schema import RunConfig
from trainer.groups.nodes import joined_cluster, plan_on
from trainer.groups.worker_groups import WorkerGroups, worker_class
from trainer.hooks import Hooks, check_callbacks
from trainer.loop import Loop, Trainer
from trainer.memory import UNKNOWN, describe_axes, role_models
from trainer.observers.active import active_observers, end_of_run
from trainer.recovery import LOSSES, TURN_S, NodeDrainedError, Restarts
from trainer.run_folder.folder import MODEL, FolderLock, note_start, open_run_folder
from trainer.run_folder.result import RunResult
from trainer.run_folder.resume import ResumePoint
from trainer.run_folder.signals import StopSignals
from trainer.run_folder.tracking import BUILT_IN
from trainer.run_state import Run
from trainer.threads import describe_threads, with_threads
from verl_like.errors import ConfigError, VerlLikeError
from verl_like.files import is_remote, why_not_writable
from verl_like.placement.plan import Placement
from verl_like.placement.pools import NodeSpec
from verl_like.process.sandbox import reject_nested_run
from verl_like.process.threads import computing_with
from verl_like.registry import check_methods, load_object
from verl_like.terminal import printable


def run(
    config: RunConfig,
    trainer_cls: type[Trainer] | None = None,
    callbacks: Sequence[object] = (),
) -> RunResult:
    """Run a configuration to its end, and return the result.

    Example:

        config = load_config(["data.train_files=a.parquet", "actor_rollout_ref.model.path=m"])
        result = run(config, callbacks=[PrintReward()])
        result.metrics[-1]["critic/score/mean"], result.model_folder

    Args:
        config: from `load_config`; with `trainer.dry_run`, it is only checked.
        trainer_cls: a subclass of the recipe's trainer, instead of `trainer.cls`.
        callbacks: objects with hooks of `verl_like.Hooks`.

    Raises:
        ConfigError: the configuration, its data or its run folder does not allow the run.
        RunInterrupted: Ctrl-C or another signal stopped the run.
        VerlLikeError: the run failed; the subclass says at what, such as `WorkerDiedError`.
    """
    if config.trainer.dry_run:
        return check(config, trainer_cls, callbacks)
    return run_steps(config, trainer_cls, callbacks)


def run_steps(
    config: RunConfig,
    trainer_cls: type[Trainer] | None = None,
    callbacks: Sequence[object] = (),
    observers: Sequence[object] = (),
    shorten: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple,
) -> RunResult:
    """Run to the end, like `run`; with `trainer.dry_run`, on the first rows of large files.

    `observers` follow those of every run. `shorten` changes the trainer's inputs.
    """
    from trainer.tools.report.page import close_run  # a tool, which the core does not need

    trainer_cls = _checked_class(config, trainer_cls, callbacks)
    recipe = trainer_cls.recipe

    with ExitStack() as at_end:
        at_end.enter_context(reproducible_arithmetic())
        stop = at_end.enter_context(StopSignals())
        if any(map(is_remote, (config.trainer.default_local_dir, config.trainer.resume_from_path))):
            from trainer.run_folder.remote import local_run_folder

            config = at_end.enter_context(local_run_folder(config))
        config = with_threads(config)
        # a folder that this run cannot resume is rejected before anything is read
        lock = at_end.enter_context(FolderLock(config.trainer.default_local_dir))
        nothing_left = ResumePoint(config).finished_message
        if nothing_left:
            print(nothing_left, flush=True)
            close_run(config.trainer.default_local_dir, None)
            return RunResult.of(config, recipe.role)

        of_attempt = at_end.enter_context(ExitStack())
        inputs = shorten(trainer_cls.prepare(config, of_attempt))
        config = recipe.resolve(config)
        folder = open_run_folder(config, lock)

        observers, ended = [*active_observers(config, recipe), *observers], False
        try:
            attempts_of = Attempts(config, trainer_cls, observers, callbacks, stop)
            with closing(attempts_of) as attempts:
                while not ended:
                    try:
                        attempts.run(folder, inputs)
                        ended = True
                    except LOSSES as error:
                        of_attempt.close()
                        attempts.prepare_next(error)
                        inputs = trainer_cls.prepare(attempts.config, of_attempt)
            end_of_run(observers)
        finally:
            close_run(folder, sys.exception())
    return RunResult.of(config, recipe.role)


def check(
    config: RunConfig,
    trainer_cls: type[Trainer] | None = None,
    callbacks: Sequence[object] = (),
    plan: Callable[[RunConfig], str] | None = None,
) -> RunResult:
    """Make the checks of a run, print the plan, and start nothing.

    If `plan` is given, its text replaces the short plan. If a check fails, nothing is printed, and
    the error's notes have the memory, which needs no data.
    """
    trainer_cls = _checked_class(config, trainer_cls, callbacks)
    if is_remote(config.trainer.default_local_dir):
        from trainer.run_folder.remote import without_remote_folders

        config = without_remote_folders(config)
    config = with_threads(config)
    with reproducible_arithmetic():
        try:
            lines = preflight_lines(config, trainer_cls)
        except VerlLikeError as error:
            with suppress(VerlLikeError):
                describe = trainer_cls.recipe.describe
                for memory in describe(config, trainer_cls, True)[:1]:
                    if not memory.startswith(UNKNOWN):
                        for line in memory.splitlines():
                            error.add_note(line)
            raise
        if plan is not None:
            print(plan(config), flush=True)
        config = trainer_cls.recipe.resolve(config)
        if plan is None:
            show_plan(nominal_placement(config), config, trainer_cls)
        print("", *lines, sep="\n", flush=True)
    return RunResult.of(config, trainer_cls.recipe.role)


def _checked_class(
    config: RunConfig, trainer_cls: type[Trainer] | None, callbacks: Sequence[object]
) -> type[Trainer]:
    """Return the trainer's class, after the checks that need no data."""
    reject_nested_run()
    trainer_cls = trainer_cls or trainer_class(config)
    check_trainer(trainer_cls)
    check_callbacks(callbacks)
    is_ours = trainer_cls.__module__.partition(".")[0] == "trainer"
    if is_ours and not callbacks:  # a user's stage or callback may write further columns
        trainer_cls.recipe.check_columns(config)
    return trainer_cls


def num_rows(inputs: tuple[Any, ...]) -> int | None:
    """Return the number of rows to train on, if the inputs of the trainer have a loader of ours."""
    from trainer.data.loader import RowLoader
    from trainer.data.prompts import PromptLoader

    for loader in inputs:
        if isinstance(loader, PromptLoader):
            return len(loader.prompts)
        if isinstance(loader, RowLoader):
            return len(loader)
    return None


class Attempts:
    """Attempts to run the steps to the end; processes survive a failed attempt where possible."""

    def __init__(
        self,
        config: RunConfig,
        trainer_cls: type[Trainer],
        observers: Sequence[object],
        callbacks: Sequence[object],
        stop: StopSignals,
    ) -> None:
        """All attempts share the observers, the callbacks and the signals."""
        self.config, self._trainer_cls = config, trainer_cls
        self._observers, self._callbacks, self._stop = observers, callbacks, stop
        self._restarts = Restarts(config, stop)
        self._step = 0
        """The step that failed last; 0: the run failed before its first step."""
        self._groups: WorkerGroups | None = None
        self._trainer: Trainer | None = None
        self._failed_at = 0.0

    def run(self, folder: Path, inputs: tuple[Any, ...]) -> None:
        """Start the missing processes, and train."""
        note_start(folder, num_rows(inputs))
        if self._failed_at:
            self._trainer = None
            gc.collect()  # the last attempt's objects refer to each other, and the loop keeps them
        if self._groups is None:
            code = self._trainer_cls.recipe.worker_code(self.config)
            start = partial(WorkerGroups, self.config, code)
            self._groups = self._restarts.wait_for_capacity(start, self._failed_at)
            self._groups.note_placement()
            show_plan(self._groups.placement, self.config, self._trainer_cls)
        run = Run(
            self.config,
            self._groups,
            observers=self._observers,
            callbacks=self._callbacks,
            stop=self._stop,
            restarts=self._restarts,
        )
        self._trainer = self._trainer_cls(run, *inputs)
        try:
            Loop(self._trainer).run()
        finally:
            self._step, self._failed_at = run.step or self._step, time.monotonic()

    def prepare_next(self, error: VerlLikeError) -> None:
        """Prepare another attempt with the groups that survive; raise if none is possible."""
        self._stop.end(f"in step {self._step}, which lost a worker")
        if isinstance(error, NodeDrainedError):
            self._restarts.note_move(error, self._step)
        else:
            self._restarts.wait_for_next(error, self._step)
        self.config = self._restarts.resuming(self.config)
        if self._groups is None or self._trainer is None:
            return
        has_cluster = True
        if self.config.trainer.backend == "ray":
            from verl_like.backends.ray.cluster import leave_if_broken

            has_cluster = not leave_if_broken()
        from trainer.lost_groups import restart_groups

        roles = self._trainer.replaceable_roles()
        survives = has_cluster and restart_groups(
            self._groups, roles, self._restarts, self._failed_at, TURN_S
        )
        if not survives:
            self.close()

    def close(self) -> None:
        """End every process."""
        if self._groups is not None:
            self._groups.shutdown()
        self._groups = self._trainer = None


@contextmanager
def reproducible_arithmetic() -> Iterator[None]:
    """Compute with one thread in the driver, except in calls of workers in its process."""
    with computing_with(1):
        yield


def show_plan(placement: Placement, config: RunConfig, trainer_cls: type[Trainer]) -> None:
    """Print a short plan."""
    print(describe_plan(placement, config, trainer_cls), flush=True)


def describe_plan(
    placement: Placement, config: RunConfig, trainer_cls: type[Trainer], full: bool = False
) -> str:
    """Return the placement and the parts of a step."""
    trainer, models = config.trainer, role_models(config)
    parts = trainer_cls.recipe.describe(config, trainer_cls, not full)
    parts = [*parts, placement.draw(describe_axes(config, models))]
    if any(len(pool.nodes) > 1 for pool in placement.pools.values()):
        from trainer.groups.describe import propose_hsdp

        parts += propose_hsdp(placement, models)
    if not full and trainer.device == "auto" and trainer.n_gpus_per_node > 1:
        if "cpu" in {pool.device_kind for pool in placement.pools.values()}:
            parts.append("note: no GPU was found, so a process starts for each CPU slot.")
    parts += [describe_threads(config), describe_saving(config, trainer_cls)]
    if not full:
        parts.append("With --full, `verl-like check` prints the whole plan.")
    return ("\n\n" if full else "\n").join(printable(part) for part in parts if part)


def describe_saving(config: RunConfig, trainer_cls: type[Trainer]) -> str:
    """Return where the trained model will be, or a warning; "" if the run trains none."""
    trainer = config.trainer
    if not trainer_cls.recipe.exports_model(config):
        return ""
    if trainer.save_final:
        return f"Final model: {trainer.default_local_dir}/{MODEL}"
    if trainer.save_freq >= 0:
        return "trainer.save_final=false: the trained model is only in checkpoints."
    if trainer.save_every_minutes is not None:
        return (
            "warning: no model will be saved if the run ends within "
            f"{trainer.save_every_minutes:g} minutes (trainer.save_every_minutes), because of "
            "trainer.save_final=false."
        )
    return (
        "warning: no model will be saved (trainer.save_final=false, trainer.save_freq=-1, "
        "trainer.save_every_minutes=null)."
    )


def nominal_placement(config: RunConfig) -> Placement:
    """Return the plan on the configured nodes, without looking for them."""
    trainer = config.trainer
    devices, cpus = run_devices(trainer), float(os.cpu_count() or 1)
    if trainer.simulate is not None:  # CPUs of simulated machines: one per process
        cpus = float(trainer.n_gpus_per_node)
    is_here = trainer.nnodes == 1 and not joined_cluster(config)
    on_cpus = trainer.device == "cpu" or (is_here and devices.type == "cpu")
    kind = "CPU slot" if on_cpus else devices.gpu or "device"
    name = "this machine" if is_here and trainer.simulate is None else "node {}"
    nodes = [
        NodeSpec(name.format(number), trainer.n_gpus_per_node, cpus, kind)
        for number in range(trainer.nnodes)
    ]
    return plan_on(config, nodes)


def trainer_class(config: RunConfig) -> type[Trainer]:
    """Return the class at `trainer.cls`."""
    cls = load_object(config.trainer.cls, "trainer.cls")
    if not (isinstance(cls, type) and issubclass(cls, Trainer)):
        default = type(config.trainer)().cls
        hint = f" The recipe's class is {default}." if default else ""
        raise ConfigError(
            f"trainer.cls={config.trainer.cls} is not a subclass of trainer.Trainer.{hint}"
        )
    return cls


def check_trainer(cls: type[Trainer]) -> None:
    """Reject hooks and stages that do not fit their calls; if `step` is overridden, only hooks."""
    ours = (parent for parent in cls.__mro__ if parent.__module__.startswith("trainer."))
    base = next(parent for parent in ours if issubclass(parent, Trainer))
    hooks = [name for name in vars(Hooks) if name.startswith("on_")]
    names = None if cls.step is base.step else hooks
    check_methods(cls, base, f"trainer.cls={cls.__module__}.{cls.__qualname__}", names)


NO_ERRORS = (
    "No errors found. (Not checked: what only a run does, such as load weights, generate, train, "
    "and reach other nodes.)"
)


def preflight_lines(config: RunConfig, trainer_cls: type[Trainer]) -> list[str]:
    """Return lines about the run; raise if its devices, classes, folder or data do not fit."""
    if config.trainer.backend == "local" and config.trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes={config.trainer.nnodes} with trainer.backend=local, which starts "
            "processes only on this machine. Set trainer.nnodes=1 or trainer.backend=ray."
        )
    if config.trainer.backend == "ray" and config.ray.runtime_env:
        from verl_like.backends.ray.runtime_env import check_runtime_env

        check_runtime_env(config.ray.runtime_env, runs_here=joined_cluster(config) is None)
    from trainer.groups.describe import describe_devices

    lines = [describe_devices(config)]
    for role in config.role_workers:
        worker_class(config, role)
    start = ResumePoint(config).start
    if start is not None:
        lines.append(f"The run resumes from {start}")
    folder = config.trainer.default_local_dir  # it is not created here
    problem = why_not_writable(Path(folder))
    if problem:
        raise ConfigError(
            f"trainer.default_local_dir={folder} is not writable: {problem}. Choose another folder."
        )
    for name in config.trainer.logger:
        if name in BUILT_IN and name != "console" and find_spec(name) is None:
            lines.append(
                f"trainer.logger includes {name}, which is not installed: the run continues "
                f"without it. Install it with pip install 'verl-like[{name}]'"
            )

    with ExitStack() as at_end:
        inputs = trainer_cls.prepare(config, at_end)
        lines += trainer_cls.recipe.describe_inputs(config, *inputs)
    return [*lines, NO_ERRORS]
