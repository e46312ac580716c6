"""What each generator and trainer does at every moment: busy, waiting or syncing weights.

The driver's threads say it as they go, the step logs the seconds, a stall names who waits for what:

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

from trainer.report.async_training import STATES

VERBS = {
    "waiting": "has waited {} for",
    "syncing": "has synced {}:",
    "busy": "was busy {} with",
    "gone": "has been without processes for {}:",
}


class State(NamedTuple):
    """What a role does, and since when."""

    name: str
    what: str
    since: float


class Activity:
    """The states of named roles, such as `generator 0` and `trainer`.

    From the first block of any role on, a role is in one state at every moment: that of its
    innermost open block, and outside all of them it waits for something to do. So its seconds add
    up to the wall time, but for those in which it is gone: it does nothing then. The blocks of a
    role are one thread's; any thread may read them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._roles: dict[str, RoleActivity] = {}
        self._logged: dict[str, dict[str, float]] = {}
        self.lock = threading.RLock()

    def of(self, role: str) -> RoleActivity:
        """The role's states, to be entered. Before it was first named it waited."""
        with self.lock:
            return self._roles.setdefault(role, RoleActivity(self))

    def now(self, begins: bool = False) -> float:
        """Seconds since the first block: models are loaded before."""
        if begins and self._began is None:
            self._began = self._clock()
        return 0.0 if self._began is None else self._clock() - self._began

    def seconds(self) -> dict[str, dict[str, float]]:
        """Role -> state -> seconds until now."""
        with self.lock:
            now = self.now()
            return {name: role.seconds(now) for name, role in self._roles.items()}

    def metrics(self) -> dict[str, float]:
        """`async/<role>/<state>_s` since the last call: a step's metrics."""
        before, self._logged = self._logged, self.seconds()
        return {
            f"async/{role.replace(' ', '_')}/{state}_s": spent - before.get(role, {}).get(state, 0)
            for role, states in self._logged.items()
            for state, spent in states.items()
        }

    def who_waits(self) -> str:
        """What every role does, for the report of a stall: who has waited longest comes first."""
        with self.lock:
            now = self.now()
            states = [(name, role.state) for name, role in self._roles.items()]
        states.sort(key=lambda entry: (entry[1].name != "waiting", entry[1].since))
        lines = []
        for role, state in states:
            spent = now - state.since
            duration = f"{spent:.0f} s" if spent >= 10 else f"{spent:.1f} s"
            lines.append(f"{role} {VERBS[state.name].format(duration)} {state.what}")
        return "; ".join(lines)


class RoleActivity:
    """The states of one role, each a block of `with`."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self.state = State("waiting", "something to do", 0.0)
        self._counted_to = 0.0
        self._seconds = dict.fromkeys(STATES, 0.0)

    @contextmanager
    def _enter(self, name: str, what: str) -> Iterator[None]:
        before = self.state
        self._go_to(State(name, what, 0.0))
        try:
            yield
        finally:
            self._go_to(before)

    busy = partialmethod(_enter, "busy")
    """The state of a role that computes: generate, score, update."""
    waiting = partialmethod(_enter, "waiting")
    """The state of a role that waits for something, such as `the buffer to have room`."""
    syncing = partialmethod(_enter, "syncing")
    """The state of a role that takes or gives weights, such as `weights of version 4`."""
    gone = partialmethod(_enter, "gone")
    """The state of a role whose processes are lost, until others have come."""

    def leave(self, what: str) -> None:
        """Be gone from now on."""
        self._go_to(State("gone", what, 0.0))

    def seconds(self, now: float) -> dict[str, float]:
        """The seconds spent in each state until `now`."""
        if self.state.name in self._seconds:
            self._seconds[self.state.name] += now - self._counted_to
        self._counted_to = now
        return dict(self._seconds)

    def _go_to(self, state: State) -> None:
        with self._activity.lock:
            now = self._activity.now(begins=True)
            self.seconds(now)
            self.state = state._replace(since=now)
