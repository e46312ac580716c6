"""`verl-like check` makes all checks of a run before its first process, and stops.

It prints its lines under the plan. A run raises the same errors in the same words. Only the first
rows of large files are read (`trainer.data.files.row_limit`), so a dry run takes seconds.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.groups.nodes import devices_in_words
from trainer.groups.worker_groups import worker_class
from trainer.loop import Trainer
from trainer.run_folder.resume import ResumePoint
from trainer.run_folder.tracking import BUILT_IN
from verl_like.errors import ConfigError
from verl_like.files import blocking_path

ALL_FOUND = "Nothing is wrong that shows before a process starts."


def look_at(config: RunConfig, trainer_cls: type[Trainer]) -> list[str]:
    """Return lines about the job; raise for anything that cannot work."""
    _check_machines(config)
    lines = [devices_in_words(config)]
    for role in config.role_workers:
        worker_class(config, role)
    start = ResumePoint(config).start
    if start is not None:
        lines.append(f"the run goes on from {start}")
    _check_folder(config.trainer.default_local_dir)
    lines += _missing_trackers(config)

    with ExitStack() as at_end:
        inputs = trainer_cls.prepare(config, at_end)
        lines += trainer_cls.look_at(config, *inputs)
    return [*lines, ALL_FOUND]


def _check_machines(config: RunConfig) -> None:
    """Reject several machines for a backend that starts processes only on this one."""
    if config.trainer.backend == "local" and config.trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes={config.trainer.nnodes} with trainer.backend=local, which starts "
            "processes only on this machine. Set trainer.nnodes=1, or take trainer.backend=ray."
        )


def _check_folder(name: str) -> None:
    """Raise if the run folder cannot be written, without creating it."""
    blocks = blocking_path(Path(name))
    if blocks is not None:
        raise ConfigError(
            f"trainer.default_local_dir={name} cannot be written: {blocks} is no folder that this "
            "user may write in. Give another one."
        )


def _missing_trackers(config: RunConfig) -> list[str]:
    lines = []
    for name in config.trainer.logger:
        if name in BUILT_IN and name != "console" and find_spec(name) is None:
            lines.append(
                f"trainer.logger names {name}, which is not installed: the run goes on without. "
                f"pip install 'verl-like[{name}]'"
            )
    return lines
