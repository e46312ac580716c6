"""The run folders of a comparison, and the groups that differ only in their seed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.flat import NAMES_OF_A_RUN
from trainer.report.read import STOPPED, RunData, read_run
from trainer.run_folder.folder import CONFIG_FILE, saved_config
from verl_like.errors import ConfigError

SEED = "trainer.seed"
ABSENT = "-"
"""The value of a key that a run does not know."""


@dataclass(frozen=True)
class ComparedRun:
    """A run folder that was read."""

    name: str
    """The part of its path in which it differs from the others."""
    data: RunData
    config: Mapping[str, Any]
    """Dotted key -> value."""

    @property
    def outcome(self) -> str:
        """The run's outcome, if known."""
        if not self.data.failure:
            return "no failure"
        if self.data.failure.startswith(STOPPED):
            return "stopped"
        last_line = self.data.failure.strip().splitlines()[-1]
        return f"failed: {last_line}"


def read_runs(folders: Sequence[str | Path]) -> list[ComparedRun]:
    """Return the runs, in the given order; raise for fewer than two."""
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    if len(paths) < 2:
        raise ConfigError(
            f"a comparison needs two run folders or more; there is {len(paths)}: "
            f"{', '.join(map(str, paths)) or 'none'}."
        )
    common = Path(os.path.commonpath(paths))
    runs = []
    for path in paths:
        name = str(path.relative_to(common)) if path != common else path.name
        config = saved_config(path) if (path / CONFIG_FILE).is_file() else {}
        runs.append(ComparedRun(name, read_run(path), config))
    return runs


def differing_keys(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the keys that differ between runs, except the runs' names."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = []
    for key in keys:
        values = [run.config.get(key, ABSENT) for run in runs]
        if key not in NAMES_OF_A_RUN and any(value != values[0] for value in values):
            differing.append(key)
    return differing


def groups_by_seed(runs: Sequence[ComparedRun]) -> dict[str, list[ComparedRun]]:
    """Return groups of runs that differ only in their seed, by the name of the first run.

    A run of another configuration is a group of its own.
    """
    told_apart = [key for key in differing_keys(runs) if key != SEED]
    groups: dict[str, list[ComparedRun]] = {}
    names: dict[str, str] = {}
    for run in runs:
        # a run without a configuration cannot be grouped
        settings = [run.config.get(key, ABSENT) for key in told_apart] if run.config else run.name
        name = names.setdefault(repr(settings), run.name)
        groups.setdefault(name, []).append(run)
    return groups
