"""A step or a stage of a run, made again from the run folder.

The run goes on from its newest checkpoint before the step, in a folder that is removed afterwards.
Its processes are the driver's own, where a pool has one; pools keep their numbers of processes,
which decide the order of sums.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer.config.schema import RunConfig
from trainer.groups.worker_groups import WorkerGroups
from trainer.launch import reproducible_arithmetic
from trainer.loop import Trainer
from trainer.ppo.config import PPOConfig
from trainer.replay.difference import counted, differing_columns, differing_metrics
from trainer.replay.saved_run import SavedRun
from trainer.replay.stage import Asked, replaying
from trainer.run_folder.batches import STAGES, batch_file
from trainer.run_folder.folder import FolderLock, open_run_folder
from verl_like.errors import PlacementError
from verl_like.process.sandbox import refuse_runs_inside

Config = TypeVar("Config", bound=RunConfig)


@dataclass(frozen=True)
class Replayed:
    """What was compared, and what differed."""

    start: Path | None
    num_metrics: int
    kept_batches: Sequence[str]
    """Stages whose kept batches were compared."""
    differences: Sequence[str]


def replay(
    run_folder: Path,
    step: int,
    stage: str = "",
    *,
    breaks: bool = False,
    from_start: bool = False,
    backend: str = "local",
) -> Replayed:
    """Make it again, and compare it with what the run wrote."""
    refuse_runs_inside()
    saved = SavedRun.read(run_folder.resolve())
    asked = Asked(saved.folder, step, stage, breaks)
    trainer_cls = replaying(saved.trainer_cls, asked)
    was = saved.metrics_of(step)
    start = saved.start_of(step, from_start)

    with tempfile.TemporaryDirectory(prefix="verl-like-replay-") as scratch:
        folder = Path(scratch) / "run"
        config = settings_of_replay(saved.config, start, folder, backend)
        print(announcement(saved, start, step, config), flush=True)
        _make(config, trainer_cls)
        names = counted(asked.metrics) if stage else None
        differences = differing_metrics(was, {"step": step, **asked.metrics}, names)
        compared = []
        for name in STAGES:
            kept, made = (batch_file(each, step, name) for each in (saved.folder, folder))
            if kept.is_file() and made.is_file():
                compared.append(name)
                lines = differing_columns(kept, made)
                differences += [f"batch of {name}: {line}" for line in lines]
    num_metrics = len(counted(was) if names is None else names)
    return Replayed(start, num_metrics, compared, differences)


def settings_of_replay(config: Config, start: Path | None, folder: Path, backend: str) -> Config:
    """The run's settings, but for where it runs, what it goes on from, and what it writes."""
    again = copy.deepcopy(config)
    trainer = again.trainer
    trainer.default_local_dir = str(folder)
    trainer.resume_mode = "auto" if start is None else "resume_path"
    trainer.resume_from_path = None if start is None else str(start)
    trainer.save_freq, trainer.save_every_minutes = -1, None
    trainer.logger, trainer.stop_at, trainer.max_restarts = [], {}, 0
    again.chaos = type(again.chaos)()
    if isinstance(again, PPOConfig):
        again.trainer.max_batches_to_keep = 1

    if backend == "local":
        trainer.backend = "local"
        trainer.n_gpus_per_node *= trainer.nnodes
        trainer.nnodes = 1
        spec = again.resource_pool_spec
        again.resource_pool_spec = {pool: [sum(sizes)] for pool, sizes in spec.items()}
    return again


def _make(config: RunConfig, trainer_cls: type[Trainer]) -> None:
    """Data, processes, and the steps up to the one that is asked for."""
    with ExitStack() as at_end:
        at_end.enter_context(reproducible_arithmetic())
        lock = at_end.enter_context(FolderLock(config.trainer.default_local_dir))
        inputs = trainer_cls.prepare(config, at_end)
        open_run_folder(config, lock)
        try:
            groups = at_end.enter_context(WorkerGroups(config, trainer_cls.worker_code(config)))
        except PlacementError as error:
            if config.trainer.backend != "local":
                raise
            raise PlacementError(
                f"{error} A replay has as many processes as the run had: with others sums come in "
                "another order. It takes the run's own backend with --backend=run."
            ) from error
        trainer_cls(config, groups, *inputs).fit()


def announcement(saved: SavedRun, start: Path | None, step: int, config: RunConfig) -> str:
    """What is made from where; and where a breakpoint in a worker's code is not reached."""
    begin = "from its beginning" if start is None else f"from {start.name}"
    lines = [f"replay of step {step} of {saved.folder}, {begin}"]
    pools = config.resource_pool_spec
    apart = [pool for pool, sizes in pools.items() if sum(sizes) > 1 or pool in config.child_pools]
    if config.trainer.backend != "local":
        apart = list(pools)
    if apart:
        lines.append(
            f"pools of processes of their own, as in the run: {', '.join(apart)}; breakpoint() "
            "works in the driver, not in these"
        )
    return "\n".join(lines)
