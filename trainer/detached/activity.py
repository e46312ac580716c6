"""What each maker and trainer does at every moment: busy, waiting or syncing weights.

The driver's threads say it as they go, the step logs the seconds, a stall names who waits for what,
and the report draws it:

    activity = Activity()
    with activity.of("maker 0").busy("generate"):
        batch = rollout.generate_sequences(prompts)
    metrics |= activity.metrics()
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from trainer.report.detached import STATES, Interval

MOST_INTERVALS = 2000
"""Intervals kept of each role, the latest ones: a run's memory does not grow with its steps."""
SHORTEST_S = 1e-3
"""Shorter intervals are drawn as part of the one before; who waits in a loop waits on."""


@dataclass(eq=False)
class _Entry:
    """A `with` block that is open: the state it puts its role in, and since when."""

    state: str
    what: str
    since: float


@dataclass
class _Role:
    """A role's open blocks, its seconds by state up to `counted_to`, and its latest intervals."""

    open: list[_Entry]
    counted_to: float
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    logged: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    last_wait: _Entry | None = None
    """The wait that was ended last, at `waited_until`."""
    waited_until: float = 0.0
    intervals: deque[Interval] = field(default_factory=lambda: deque(maxlen=MOST_INTERVALS))

    def count(self, now: float) -> None:
        """Give the time since the last count to the state that the role is in."""
        current = self.open[-1]
        self.seconds[current.state] += now - self.counted_to
        last = self.intervals[-1] if self.intervals else None
        goes_on = last and (last.state, last.what) == (current.state, current.what)
        if last and (goes_on or now - self.counted_to < SHORTEST_S):
            self.intervals[-1] = last._replace(end=now)
        elif now > self.counted_to:
            self.intervals.append(Interval(self.counted_to, now, current.state, current.what))
        self.counted_to = now


class Activity:
    """The states of named roles, such as `maker 0` and `trainer`; any thread may call any method.

    A role is in exactly one state at every moment from the first block of any role: that of the
    block opened last of those still open, and outside all blocks it waits for something to do. So a
    block inside another interrupts it, and the seconds of a role add up to the wall time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """The wall time begins with the first block: not with models that are loaded before."""
        self._clock = clock
        self._began: float | None = None
        self._roles: dict[str, _Role] = {}
        self._lock = threading.Lock()

    def of(self, role: str) -> RoleActivity:
        """The role's states, to be entered. Before it was first named it waited."""
        with self._lock:
            self._role(role)
        return RoleActivity(self, role)

    @contextmanager
    def enter(self, role: str, state: str, what: str) -> Iterator[None]:
        """Put the role in a state for the length of a block, however the block ends."""
        entry = self._open(role, state, what)
        try:
            yield
        finally:
            self._close(role, entry)

    def seconds(self) -> dict[str, dict[str, float]]:
        """Role -> state -> seconds until now."""
        with self._lock:
            return {name: dict(role.seconds) for name, role in self._counted().items()}

    def metrics(self) -> dict[str, float]:
        """`detached/<role>/<state>_s` since the last call: a step's metrics."""
        found = {}
        with self._lock:
            for name, role in self._counted().items():
                for state in STATES:
                    key = f"detached/{name.replace(' ', '_')}/{state}_s"
                    found[key] = role.seconds[state] - role.logged[state]
                role.logged = dict(role.seconds)
        return found

    def who_waits(self) -> list[str]:
        """A line on each role, for the report of a stall: who has waited longest comes first."""
        with self._lock:
            now = self._now()
            current = [(name, role.open[-1]) for name, role in self._roles.items()]
        current.sort(key=lambda pair: (pair[1].state != "waiting", pair[1].since))
        return [_in_words(name, entry, now) for name, entry in current]

    def intervals(self) -> dict[str, list[Interval]]:
        """Role -> its latest intervals, which follow each other without a gap."""
        with self._lock:
            return {name: list(role.intervals) for name, role in self._counted().items()}

    def as_json(self) -> dict[str, Any]:
        """What `detached.json` keeps for the report: `activity` in seconds, and `intervals`."""
        return {"activity": self.seconds(), "intervals": self.intervals()}

    def _now(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began

    def _role(self, name: str) -> _Role:
        """The role, which waits for something to do from the start."""
        if name not in self._roles:
            idle = _Entry("waiting", "something to do", 0.0)
            self._roles[name] = _Role(open=[idle], counted_to=0.0)
        return self._roles[name]

    def _counted(self) -> dict[str, _Role]:
        """All roles, with their time counted until now."""
        now = self._now()
        for role in self._roles.values():
            role.count(now)
        return self._roles

    def _open(self, name: str, state: str, what: str) -> _Entry:
        with self._lock:
            if self._began is None:
                self._began = self._clock()
            role, now = self._role(name), self._now()
            role.count(now)
            entry = _Entry(state, what, now)
            if state == "waiting" and role.last_wait and now - role.waited_until < SHORTEST_S:
                entry.since = role.last_wait.since  # a loop looks again at what it waits for
            role.open.append(entry)
        return entry

    def _close(self, name: str, entry: _Entry) -> None:
        """End a block; another thread's blocks of the role may have been opened after it."""
        with self._lock:
            role, now = self._role(name), self._now()
            role.count(now)
            role.open.remove(entry)
            if entry.state == "waiting":
                role.last_wait, role.waited_until = entry, now
            if role.open[-1] is role.open[0]:
                role.open[0].since = now


@dataclass(frozen=True)
class RoleActivity:
    """The states of one role, each a block of `with`."""

    activity: Activity
    role: str

    def busy(self, what: str) -> AbstractContextManager[None]:
        """It computes: generate, score, update."""
        return self.activity.enter(self.role, "busy", what)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """It waits for what `what` says: `the buffer to have room`."""
        return self.activity.enter(self.role, "waiting", what)

    def syncing(self, what: str) -> AbstractContextManager[None]:
        """It takes or gives weights: `weights of version 4`."""
        return self.activity.enter(self.role, "syncing", what)


def _in_words(role: str, entry: _Entry, now: float) -> str:
    seconds = now - entry.since
    spent = f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    if entry.state == "waiting":
        return f"{role} has waited {spent} for {entry.what}"
    if entry.state == "syncing":
        return f"{role} has been syncing {entry.what} for {spent}"
    return f"{role} has been busy with {entry.what} for {spent}"
