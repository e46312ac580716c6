"""Record the state of each generator and of the trainer: busy, waiting, or syncing weights.

The driver's threads enter these states, every step logs the seconds spent in each, and the report
of a stall says who waits for what:

    activity = Activity()
    with activity.of("generator 0").busy("generate"):
        batch = rollout.generate_sequences(prompts)
    metrics |= activity.metrics()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import NamedTuple

from trainer.run_folder.accounts import STATES

VERBS = {
    "waiting": "has waited {} for",
    "syncing": "has spent {} syncing",
    "busy": "has been busy {} with",
    "gone": "has been without processes for {}:",
}


class ActivityState(NamedTuple):
    """A role's state and the time when it began."""

    name: str
    task: str
    since: float


class Activity:
    """The states of roles by name, such as `generator 0` and `trainer`.

    A role enters a state with a `with` block. From the first block of any role on, every role is in
    exactly one state: that of its innermost open block or, outside all blocks, `waiting` (after
    `leave`: `gone`). Its seconds add up to the wall time, minus the time in the state `gone`. One
    thread enters the blocks of a role; any thread may read its seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._roles: dict[str, RoleActivity] = {}
        self._logged: dict[str, dict[str, float]] = {}
        self.lock = threading.RLock()

    def of(self, role: str) -> RoleActivity:
        """Return the states of a role, which is added as waiting if it is new."""
        with self.lock:
            return self._roles.setdefault(role, RoleActivity(self))

    def now(self, begins: bool = False) -> float:
        """Return the seconds since the first block; models are loaded before that."""
        if begins and self._began is None:
            self._began = self._clock()
        return 0.0 if self._began is None else self._clock() - self._began

    def seconds(self) -> dict[str, dict[str, float]]:
        """Return the seconds until now, by role and state."""
        with self.lock:
            now = self.now()
            return {name: role.seconds(now) for name, role in self._roles.items()}

    def metrics(self) -> dict[str, float]:
        """Return `async/<role>/<state>_s`, the seconds in each state since the last call."""
        before, self._logged = self._logged, self.seconds()
        return {
            f"async/{role.replace(' ', '_')}/{state}_s": spent - before.get(role, {}).get(state, 0)
            for role, states in self._logged.items()
            for state, spent in states.items()
        }

    def who_waits(self) -> str:
        """Describe every role's state for the report of a stall, the longest wait first."""
        with self.lock:
            now = self.now()
            states = [(name, role.state) for name, role in self._roles.items()]
        states.sort(key=lambda entry: (entry[1].name != "waiting", entry[1].since))
        lines = []
        for role, state in states:
            spent = now - state.since
            duration = f"{spent:.0f} s" if spent >= 10 else f"{spent:.1f} s"
            lines.append(f"{role} {VERBS[state.name].format(duration)} {state.task}")
        return "; ".join(lines)


class RoleActivity:
    """The states of one role, each entered with a `with` block."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self.state = ActivityState("waiting", "something to do", 0.0)
        self._counted_to = 0.0
        self._seconds = dict.fromkeys(STATES, 0.0)

    @contextmanager
    def _enter(self, name: str, task: str) -> Iterator[None]:
        before = self.state
        self._go_to(ActivityState(name, task, 0.0))
        try:
            yield
        finally:
            self._go_to(before)

    busy = partialmethod(_enter, "busy")
    """The state of a role that computes: generate, score, update."""
    waiting = partialmethod(_enter, "waiting")
    """The state of a role that waits for something, such as `the buffer to have room`."""
    syncing = partialmethod(_enter, "syncing")
    """The state of a role that sends or receives weights, such as `weights of version 4`."""
    gone = partialmethod(_enter, "gone")
    """The state of a role whose processes are lost, until new ones have started."""

    def leave(self, task: str) -> None:
        """Enter the state `gone` for good."""
        self._go_to(ActivityState("gone", task, 0.0))

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds spent in each state until `now`."""
        if self.state.name in self._seconds:
            self._seconds[self.state.name] += now - self._counted_to
        self._counted_to = now
        return dict(self._seconds)

    def _go_to(self, state: ActivityState) -> None:
        with self._activity.lock:
            now = self._activity.now(begins=True)
            self.seconds(now)
            self.state = state._replace(since=now)
