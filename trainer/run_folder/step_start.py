"""The driver as a step found it, kept in memory while the step is made.

Where the roles are as they were then, too, a run goes on from it instead of from a checkpoint:
`trainer.loop` keeps one, `trainer.recovery` decides, `Checkpoints.load` gives it back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from verl_like.process.random_state import get_random_state, set_random_state


@dataclass(frozen=True)
class StepStart:
    """What a checkpoint of the step before would hold of the driver."""

    last_step: int
    """The step before."""
    state: str
    """`Trainer.state_dict`, as JSON: nothing that the step changes is shared."""
    random_state: dict[str, Any] = field(default_factory=get_random_state)

    @classmethod
    def after(cls, last_step: int, state: dict[str, Any]) -> StepStart:
        """Of the step that follows `last_step`; the random state is that of now."""
        return cls(last_step, json.dumps(state))

    def restore(self) -> dict[str, Any]:
        """Set the driver's random state back, and give what `Trainer.load_state_dict` takes."""
        set_random_state(self.random_state)
        state: dict[str, Any] = json.loads(self.state)
        return state
