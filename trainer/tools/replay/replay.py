"""Repeat a step or a stage of a run from the run folder.

The replay resumes from the newest checkpoint before the step, if there is one, in a folder that is
removed afterwards. With `backend="local"`, most pools of one process run in the driver's process.
Pools have the same number of processes as in the run, because it determines the order of sums.

The run folder is only read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.key_errors import unresolved_value
from trainer.config.schema import Recipe, RunConfig
from trainer.groups.worker_groups import WorkerGroups
from trainer.launch import reproducible_arithmetic
from trainer.loop import Loop, Trainer
from trainer.observers.active import active_observers
from trainer.observers.saved_batches import STAGES, SavedBatches, batch_file
from trainer.ppo.config import PPOConfig
from trainer.ppo.stages import PPOTrainer
from trainer.run_folder.folder import (
    CONFIG_FILE,
    FolderLock,
    folder_names,
    installed_versions,
    open_run_folder,
    read_marker,
    saved_steps,
    saved_tree,
)
from trainer.run_state import Metrics, Run
from trainer.tools.replay.what_if import HEADLINES, Blame, estimate_without, log_prob_change
from verl_like.batch.protocol import DataProto
from verl_like.config_key import replace_keys
from verl_like.errors import CheckpointError, ConfigError, PlacementError
from verl_like.files import json_objects
from verl_like.process.sandbox import reject_nested_run
from verl_like.registry import load_object

TIMING_PREFIXES = ("timing", "perf/")
"""Prefixes of metrics about seconds, speed and memory of the machine."""
SECONDS = "_s/mean"
"""The suffix of metrics about seconds of trajectories."""
TIMES = ("times", "engine_s", "environment_s", "waiting_s")
"""Fields of a trajectory in seconds."""


def counted(names: Collection[str]) -> list[str]:
    """Return the metrics to compare."""
    return sorted(n for n in names if not n.startswith(TIMING_PREFIXES) and not n.endswith(SECONDS))


def differing_metrics(
    was: Mapping[str, float], now: Mapping[str, float], names: Collection[str]
) -> list[str]:
    """Return a line for every metric of these names that differs."""
    lines = []
    for name in names:
        before, after = (repr(float(x[name])) if name in x else "absent" for x in (was, now))
        if before != after:
            lines.append(f"{name} was {before}, is {after}")
    return lines


def differing_columns(was: Path, now: Path) -> list[str]:
    """Return a line for every column that differs between two saved batches."""
    before, after = (_columns(DataProto.load_from_disk(path)) for path in (was, now))
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            lines.append(f"{name} is new" if name in after else f"{name} is absent")
        elif difference := _difference(before[name], after[name]):
            lines.append(f"{name} {difference}")
    return lines


def _columns(batch: DataProto) -> dict[str, Any]:
    tensors = {name: batch.padded(name) for name in batch.columns}
    return {**tensors, **batch.non_tensor_batch}


def _difference(before: Any, after: Any) -> str:
    if before.shape != after.shape or before.dtype != after.dtype:
        return (
            f"was {tuple(before.shape)} of {before.dtype}, is {tuple(after.shape)} of {after.dtype}"
        )
    pairs = enumerate(zip(before, after, strict=True))
    rows = [number for number, (first, second) in pairs if _bits(first) != _bits(second)]
    return f"differs in {len(rows)} of {len(before)} rows, first in row {rows[0]}" if rows else ""


def _bits(row: Any) -> Any:
    """Return the content of a row, in which NaN equals itself and 0.0 differs from -0.0."""
    if isinstance(row, torch.Tensor):
        return row.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(row, np.ndarray | np.generic) and row.dtype != np.dtype(object):
        return row.tobytes()
    if isinstance(row, dict):
        return repr({name: row[name] for name in row if name not in TIMES})
    return repr(row)


Config = TypeVar("Config", bound=RunConfig)
Samples = Callable[[PPOTrainer, DataProto], DataProto]
"""Returns other samples instead of a generated batch."""


@dataclass(frozen=True)
class Replayed:
    """Compared metrics and batches, and their differences."""

    start: Path | None
    num_metrics: int
    compared_batches: Sequence[str]
    """Stages whose saved batches were compared."""
    differences: Sequence[str]
    what_if: Sequence[str] = ()
    """Loss, KL, gradient norms and the next step's log-probs, if something was changed."""


def replay(
    run_folder: Path,
    step: int,
    stage: str = "",
    *,
    breaks: bool = False,
    from_start: bool = False,
    backend: str = "local",
    changes: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    blame: Blame | None = None,
    samples: Mapping[int, Samples] | None = None,
    on_made: Callable[[Path], None] = lambda folder: None,
) -> Replayed:
    """Repeat the step, with changes if there are any, and compare it with the run's files.

    `samples` replaces the generated batches of its steps, so that they are repeated, too. `on_made`
    gets the folder of the repeated step before it is removed.
    """
    reject_nested_run()
    saved = ReplayableRun.read(run_folder.resolve())
    request = ReplayRequest(saved.folder, step, stage, breaks, without=without, blame=blame)
    request.samples = samples or {}
    following = batch_file(saved.folder, step + 1, "estimate")
    if (changes or without) and following.is_file():
        request.following = DataProto.load_from_disk(following)
    trainer_cls = replaying(saved.trainer_cls, request)
    was = saved.metrics_of(step)
    start = saved.start_of(min([step, *request.samples]), from_start)

    with tempfile.TemporaryDirectory(prefix="verl-like-replay-") as scratch:
        folder = Path(scratch) / "run"
        config = settings_of_replay(saved.config, start, folder, backend)
        config = replace_keys(config, dict(changes or {}))
        print(announcement(saved, start, step, config), flush=True)
        make(config, trainer_cls)
        on_made(folder)
        now = {"step": step, **request.metrics}
        names = counted(request.metrics if stage else was.keys() | now.keys())
        differences, compared = list[str](), list[str]()
        for name in STAGES:
            old, new = (batch_file(source, step, name) for source in (saved.folder, folder))
            if old.is_file() and new.is_file():
                compared.append(name)
                lines = differing_columns(old, new)
                differences += [f"batch of {name}: {line}" for line in lines]
        differences += differing_metrics(was, now, names)
    what_if = what_changed(was, now, request) if changes or without else []
    return Replayed(start, len(names), compared, differences, what_if)


def what_changed(
    was: Mapping[str, float], now: Mapping[str, float], request: ReplayRequest
) -> list[str]:
    """Describe what a change did to loss, KL, gradients and the next step's log-probs."""
    lines = [f"{n}: {was[n]:.6g} -> {now[n]:.6g}" for n in HEADLINES if n in was and n in now]
    return [*lines, request.log_probs]


def settings_of_replay(config: Config, start: Path | None, folder: Path, backend: str) -> Config:
    """Return the run's settings with changed folder, backend, resume and output."""
    changes: dict[str, Any] = {
        "trainer.default_local_dir": str(folder),
        "trainer.resume_mode": "auto" if start is None else "resume_path",
        "trainer.resume_from_path": None if start is None else str(start),
        "trainer.save_freq": -1,
        "trainer.save_every_minutes": None,
        "trainer.save_final": False,
        "trainer.logger": [],
        "trainer.stop_at": {},
        "trainer.max_restarts": 0,
    }
    if isinstance(config, PPOConfig):
        changes["trainer.batch_steps_to_keep"] = 1
    if backend == "local":
        spec = config.resource_pool_spec
        changes |= {
            "trainer.backend": "local",
            "trainer.n_gpus_per_node": config.trainer.n_gpus_per_node * config.trainer.nnodes,
            "trainer.nnodes": 1,
            "resource_pool_spec": {pool: [sum(sizes)] for pool, sizes in spec.items()},
        }
    return replace_keys(config, changes)


def make(config: RunConfig, trainer_cls: type[Trainer]) -> None:
    """Prepare data and processes, and run the steps up to the requested one."""
    with ExitStack() as at_end:
        at_end.enter_context(reproducible_arithmetic())
        lock = at_end.enter_context(FolderLock(config.trainer.default_local_dir))
        inputs = trainer_cls.prepare(config, at_end)
        recipe = trainer_cls.recipe
        config = recipe.resolve(config)
        open_run_folder(config, lock)
        try:
            groups = at_end.enter_context(WorkerGroups(config, recipe.worker_code(config)))
        except PlacementError as error:
            if config.trainer.backend != "local":
                raise
            raise PlacementError(
                f"{error} A replay needs as many processes as the run had, because with another "
                "number of processes, sums are added in a different order. Add --backend=run to "
                "use the run's backend."
            ) from error
        observers = active_observers(config, recipe)
        trainer = trainer_cls(Run(config, groups, observers), *inputs)
        Loop(trainer, saves_model=False).run()


def announcement(saved: ReplayableRun, start: Path | None, step: int, config: RunConfig) -> str:
    """Describe what is repeated from which state, and where breakpoints do not work."""
    begin = "from its beginning" if start is None else f"from {start.name}"
    lines = [f"replay of step {step} of {saved.folder}, {begin}"]
    pools = config.resource_pool_spec
    apart = [pool for pool, sizes in pools.items() if sum(sizes) > 1 or pool in config.child_pools]
    if config.trainer.backend != "local":
        apart = list(pools)
    if apart:
        lines.append(
            f"these pools run in separate processes, as in the run: {', '.join(apart)}; "
            "breakpoint() works only in the driver"
        )
    return "\n".join(lines)


@dataclass
class ReplayRequest:
    """A request for a replay, and its result."""

    run_folder: Path
    step: int
    stage: str = ""
    """Empty: the whole step."""
    breaks: bool = False
    """True if the debugger is entered right before the step or stage."""
    without: Sequence[str] = ()
    """Names of samples to leave out."""
    blame: Blame | None = None
    samples: Mapping[int, Samples] = field(default_factory=dict)
    """Step -> what replaces its samples."""
    following: DataProto | None = None
    """The samples of the next step, as the run saved them."""
    log_probs: str = "the run did not save the next step's samples (trainer.batch_steps_to_keep)"
    """Describes the change of their log-probs."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the step or of the stage."""


def replaying(trainer_cls: type[Trainer], request: ReplayRequest) -> type[Trainer]:
    """Return a subclass of the trainer that ends after the requested step."""
    if request.stage and not issubclass(trainer_cls, PPOTrainer):
        raise ConfigError(
            f"--stage: a step of {trainer_cls.__qualname__} has no stages {', '.join(STAGES)}; "
            "only verl-like ppo has them. Leave --stage out."
        )
    if request.stage and trainer_cls.step is not PPOTrainer.step:
        raise ConfigError(
            f"--stage: {trainer_cls.__qualname__} overrides the step, so its stages are "
            "unknown. Leave --stage out; --break stops before that step."
        )

    if (request.without or request.blame) and not issubclass(trainer_cls, PPOTrainer):
        raise ConfigError(
            f"--without and --blame: a step of {trainer_cls.__qualname__} has no samples; only "
            "verl-like ppo has them."
        )

    class Replaying(trainer_cls):  # type: ignore[misc, valid-type]
        def step(self) -> Metrics:
            if self.global_step != request.step:
                return super().step()  # type: ignore[no-any-return]
            self.run.end_reason = f"step {request.step} was replayed"
            if request.stage:
                self.has_validation = False
                return one_stage(self, request)
            if request.breaks:
                breakpoint()  # noqa: T100 - `step` goes into the run's own step
            return super().step()  # type: ignore[no-any-return]

        def generate(self, prompts: DataProto, attempt: int = 0) -> DataProto:
            batch: DataProto = super().generate(prompts, attempt)
            forced = request.samples.get(self.global_step)
            return batch if forced is None else forced(self, batch)

        def estimate(self, batch: DataProto) -> tuple[DataProto, Metrics]:
            if self.global_step != request.step or not request.without:
                return super().estimate(batch)  # type: ignore[no-any-return]
            return estimate_without(super().estimate, batch, request.without)

        def call(self, role: str, method: str, batch: DataProto, *others: Any, **sets: Any) -> Any:
            is_update = self.global_step == request.step and method == f"update_{role}"
            if is_update and request.blame is not None:
                sent = batch.select()
                sent.meta_info = sent.meta_info | sets
                request.blame.measure(self, role, sent)
            return super().call(role, method, batch, *others, **sets)

        def on_step_end(self, metrics: Metrics) -> None:
            super().on_step_end(metrics)
            if self.global_step == request.step:
                request.metrics = dict(metrics)
                if request.following is not None:
                    call = self.call("actor", "compute_log_prob", request.following)
                    request.log_probs = log_prob_change(request.following, call.batch())

    Replaying.__qualname__ = trainer_cls.__qualname__
    return Replaying


def one_stage(trainer: PPOTrainer, request: ReplayRequest) -> Metrics:
    """Run the stage on the batch that the run saved, or on the output of the earlier stages."""
    batch = stage_input(trainer, request)
    stage = getattr(trainer, request.stage)
    if request.breaks:
        breakpoint()  # noqa: T100 - `step` goes into the stage, `batch` is its input
    result = stage(batch)

    if request.stage == "update":
        return dict(result)
    batch, metrics = result
    following = STAGES[STAGES.index(request.stage) + 1]
    SavedBatches(trainer.config).save(following, batch, trainer.global_step)
    return dict(metrics)


def stage_input(trainer: PPOTrainer, request: ReplayRequest) -> DataProto:
    """Return the batch that is the stage's input."""
    path = batch_file(request.run_folder, request.step, request.stage)
    if path.is_file():
        return DataProto.load_from_disk(path)

    batch, _ = trainer.sample()
    for stage in STAGES[: STAGES.index(request.stage)]:
        batch, _ = getattr(trainer, stage)(batch)
    return batch


RECIPES = (
    "trainer.ppo.recipe.PPO",
    "trainer.sft.recipe.SFT",
    "trainer.reward_model.recipe.REWARD_MODEL",
    "trainer.preference.recipe.DPO",
)
"""The recipes whose steps depend only on a checkpoint."""
ASYNC = "trainer.async_training.step.AsyncTrainer"
PACKAGE = "verl-like"


@dataclass(frozen=True)
class ReplayableRun:
    """A run to replay."""

    folder: Path
    config: RunConfig
    trainer_cls: type[Trainer]

    @classmethod
    def read(cls, folder: Path) -> ReplayableRun:
        """Read a run folder; reject other folders, unknown keys and recipes without a replay."""
        tree = saved_tree(folder)
        name = OmegaConf.select(tree, "trainer.cls") if OmegaConf.is_dict(tree) else None
        if not isinstance(name, str):
            raise ConfigError(f"{folder / CONFIG_FILE} has no trainer.cls.")
        trainer_cls = load_object(name, "trainer.cls")
        recipe = _recipe_of(trainer_cls, name)
        recipe.load_registries()
        try:  # the run's own configuration, which was settled and checked when it was written
            config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(recipe.schema), tree))
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{folder / CONFIG_FILE} does not fit this version of {PACKAGE}: "
                f"{unresolved_value(error, recipe)} Replay the run with the version in "
                f"{folder}/starts.jsonl."
            ) from error
        assert isinstance(config, RunConfig), f"the schema gave a {type(config).__name__}"
        return cls(folder, config, trainer_cls)

    def metrics_of(self, step: int) -> dict[str, float]:
        """Return the run's metrics of a step."""
        entries, _ = json_objects(self.folder / "metrics.jsonl")
        lines = {line["step"]: line for line in entries if "step" in line}
        steps = sorted(number for number in lines if number > 0)
        if step not in steps:
            known = f"it made steps {steps[0]} to {steps[-1]}" if steps else "it made none"
            raise ConfigError(f"--step={step}: {self.folder} has no metrics of that step; {known}.")
        return dict(lines[step])

    def start_of(self, step: int, may_begin: bool) -> Path | None:
        """Return the newest checkpoint before a step; None means the run's beginning.

        Without such a checkpoint, step 1 is replayed from where the run began, and so is a later
        step if `may_begin`; otherwise raise an error.
        """
        steps = saved_steps(self.folder)
        earlier = [number for number in steps if number < step]
        if earlier:
            start = self.folder / f"global_step_{earlier[-1]}"
            here = installed_versions().get(PACKAGE)
            wrote = read_marker(start)["versions"].get(PACKAGE, here)
            if wrote != here:  # loading warns of other packages
                raise CheckpointError(
                    f"{start} was written by {PACKAGE} {wrote}, and {here} is installed: a "
                    f"replay may differ. Install {PACKAGE}=={wrote} to replay the step."
                )
            return start

        trainer = self.config.trainer
        if step > 1 and not may_begin:
            raise CheckpointError(
                f"--step={step}: {self.folder} has no checkpoint of an earlier step (it has "
                f"{folder_names(steps)}). Repeat all {step} steps with --from-start, or replay a "
                "step after a checkpoint; trainer.max_ckpt_to_keep=null keeps all checkpoints of a "
                "run."
            )
        if trainer.resume_mode == "resume_path":
            assert trainer.resume_from_path is not None, "resume_path comes with a path"
            return Path(trainer.resume_from_path)
        return None


def _recipe_of(trainer_cls: Any, name: str) -> Recipe[Any]:
    """Return the recipe of this trainer class or of its base class."""
    recipes: list[Recipe[Any]] = [load_object(path, "recipe") for path in RECIPES]
    owners = {load_object(recipe.schema().trainer.cls, recipe.name): recipe for recipe in recipes}
    ours = {*owners, load_object(ASYNC, "async")}
    base = next((base for base in getattr(trainer_cls, "__mro__", ()) if base in ours), None)
    if base not in owners:
        raise ConfigError(
            f"a run of trainer.cls={name} cannot be replayed, only runs of verl-like "
            f"{', '.join(recipe.name for recipe in recipes)}."
        )
    return owners[base]
