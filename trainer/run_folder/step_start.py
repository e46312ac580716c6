"""The driver as a step found it, kept in memory while the step is made.

Where the roles are as they were then, too, a run goes on from it instead of from a checkpoint
(`trainer.recovery`), and `Checkpoints.load` gives it back. Roles that have lost a rank are as they
were where another rank has written the same state.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_like.calls.future import gather
from verl_like.process.random_state import get_random_state, set_random_state

REPLICAS = "replicas"
"""Folder of the run folder with the state of roles that have lost a rank, until it is loaded."""


@dataclass(frozen=True)
class SavedReplicas:
    """The state of roles that have lost a rank, written by ranks that live."""

    folder: Path
    """Of each role one that `Worker.load_checkpoint` takes, by its name."""
    ranks: Mapping[str, Sequence[int]]
    """Role -> whoever has written it."""

    def __str__(self) -> str:
        """The ranks, in words."""
        words = []
        for role, ranks in self.ranks.items():
            numbers = ", ".join(map(str, ranks))
            words.append(f"{role} rank{'s' * (len(ranks) > 1)} {numbers}")
        return " and ".join(words)

    def load(self, groups: Any) -> None:
        """Have the roles take it over; the files go."""
        roles = self.ranks
        try:
            gather(*(groups[r].load_checkpoint.remote(str(self.folder / r)) for r in roles))
        finally:
            self.drop()

    def drop(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class StepStart:
    """What a checkpoint of the step before would hold of the driver."""

    last_step: int
    """The step before."""
    state: str
    """`Trainer.state_dict`, as JSON: nothing that the step changes is shared."""
    random_state: dict[str, Any] = field(default_factory=get_random_state)
    replicas: SavedReplicas | None = None
    """Of roles that were started anew and learn; all others hold their state themselves."""

    @classmethod
    def after(cls, last_step: int, state: dict[str, Any]) -> StepStart:
        """Of the step that follows `last_step`; the random state is that of now."""
        return cls(last_step, json.dumps(state))

    @property
    def source(self) -> str:
        """Where the state of the roles is from, in words."""
        return str(self.replicas or "the processes that live")

    def restore(self, groups: Any) -> dict[str, Any]:
        """Set roles and random state back; gives what `Trainer.load_state_dict` takes."""
        if self.replicas is not None:
            self.replicas.load(groups)
        set_random_state(self.random_state)
        state: dict[str, Any] = json.loads(self.state)
        return state
