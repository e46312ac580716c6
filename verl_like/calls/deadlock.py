"""Calls that nobody will ever answer: ranks that wait for each other, found before a deadline.

A `DeadlockWatch` looks while a call is waited for. Every few seconds it asks all worker processes
of the run what they are doing (`verl_like.calls.progress`), past their queues of calls. A rank
stands still when it says the same for `watch.deadlock_s`. That is a deadlock

  - in a collective of torch's, whose ranks are those of one pool: if all others of the pool stand
    still in other collectives, or have no call that they could still begin;
  - at a lock, or in a wait that may be for another pool: if nobody in the run moves.

Whoever computes, sleeps or waits for a file or a server is left alone, and so is whoever waits for
such a one. On one node a call whose ranks do not wait for long, as those of a weight sync, is given
up sooner: what travels there takes processor time, and no network holds it up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_like.calls.progress import AT_LOCK, IDLE, IN_COLLECTIVE, Progress

if TYPE_CHECKING:
    from verl_like.calls.transport import Transport

LOOK_EVERY_S = 5.0
"""The first look is when a wait has this age."""
LOOK_S_A_RANK = 0.02
"""With many ranks looks are rarer: to ask one takes the driver 0.15 ms."""
SOON_EVERY_S = 1.0
"""The same where a call is given up soon."""
SOON_SHARE = 0.25
"""Of `watch.deadlock_s`: what is left of it there."""
ANSWER_S = 2.0
"""How long a process has to say what it is doing."""
BUSY_SHARE = 0.02
"""A process that uses more of a core than this does not stand still."""


@dataclass(frozen=True)
class _Seen:
    """What a process says, and since when it has said nothing else."""

    progress: Progress
    since: float
    last: float

    def stands_still(self, now: Progress, at: float) -> bool:
        """Whether it has not moved since the last look."""
        before = self.progress
        if (now.num_calls, now.waits) != (before.num_calls, before.waits):
            return False
        if now.waits == IDLE:
            return True
        if (now.stack, now.wakeups) != (before.stack, before.wakeups):
            return False
        is_waiting = now.waits in (IN_COLLECTIVE, AT_LOCK)
        return is_waiting and now.cpu_s - before.cpu_s <= BUSY_SHARE * (at - self.last)


class DeadlockWatch:
    """Beside one wait of the driver for the calls of a group."""

    def __init__(
        self,
        transport: Transport,
        clock: Callable[[], float] = time.monotonic,
        gives_up_soon: bool = False,
    ) -> None:
        """`transport` is that of the group that is waited for."""
        self._transport, self._clock = transport, clock
        self._seen: dict[tuple[int, int], _Seen] = {}
        """By pool (0 is this one) and rank; who did not answer the last look counts as moving."""
        soon = gives_up_soon and transport.facts[0].one_node
        num_ranks = sum(pool.world_size for pool in [transport, *transport.other_pools])
        every_s = min(SOON_EVERY_S, LOOK_EVERY_S) if soon else LOOK_EVERY_S
        self._look_every_s = max(every_s, LOOK_S_A_RANK * num_ranks)
        self.deadlock_s = transport.deadlines.deadlock_s * (SOON_SHARE if soon else 1.0)
        """For so long ranks have stood still that are stuck."""
        self._next_look = clock() + self._look_every_s
        self._looking: threading.Thread | None = None

    def stuck(self, unanswered: Collection[int]) -> list[int]:
        """Ranks without an answer that will never give one; looks when it is time to.

        Looking has a thread of its own: a process that does not answer holds nobody up.
        """
        if self._looking is not None:
            if self._looking.is_alive():
                return []
            self._looking = None
            if stuck := self.judge(unanswered, self.deadlock_s):
                return stuck
        if self._clock() >= self._next_look:
            self._next_look = self._clock() + self._look_every_s
            self._looking = threading.Thread(target=self.look, name="progress", daemon=True)
            self._looking.start()
        return []

    def look(self) -> None:
        """Ask every process once."""
        before, self._seen = self._seen, {}
        for number, pool in enumerate([self._transport, *self._transport.other_pools]):
            found, at = pool.progress(ANSWER_S), self._clock()
            for rank, progress in found.items():
                seen = before.get((number, rank))
                stands = seen is not None and seen.stands_still(progress, at)
                since = seen.since if seen is not None and stands else at
                self._seen[number, rank] = _Seen(progress, since, at)

    def judge(self, unanswered: Collection[int], seconds: float) -> list[int]:
        """The ranks that wait in vain, by what all looks have found so far."""
        pools = [self._transport, *self._transport.other_pools]
        sizes = [pool.world_size for pool in pools]
        states, *others = (self._unchanged(n, size, seconds) for n, size in enumerate(sizes))
        waiting = {rank for rank, state in states.items() if state and state.waits != IDLE}
        if not waiting.intersection(unanswered):
            return []
        if not _waits_for_absent_ranks(states, unanswered):
            if _is_one_collective([state for state in states.values() if state]):
                return []
            if any(None in pool.values() for pool in (states, *others)):
                return []
        return sorted(waiting.intersection(unanswered))

    def _unchanged(self, pool: int, num_ranks: int, seconds: float) -> dict[int, Progress | None]:
        """What each rank has been doing for so long without moving; None where it has moved."""
        found: dict[int, Progress | None] = {}
        for rank in range(num_ranks):
            seen = self._seen.get((pool, rank))
            stands = seen is not None and seen.last - seen.since >= seconds
            found[rank] = seen.progress if seen is not None and stands else None
        return found


def _waits_for_absent_ranks(
    states: dict[int, Progress | None], unanswered: Collection[int]
) -> bool:
    """Whether the ranks of one pool wait in collectives for ranks that never come there."""
    waiting: list[Progress] = []
    for rank, state in states.items():
        if state is not None and state.waits == IN_COLLECTIVE:
            waiting.append(state)
        elif state is None or state.waits != IDLE or rank in unanswered:
            return False  # it moves, or waits for others, or its call has yet to begin
    return len(waiting) < len(states) or not _is_one_collective(waiting)


def _is_one_collective(states: Sequence[Progress]) -> bool:
    """Whether all wait at one place in a collective: a slow network is no deadlock."""
    places = {state.stack for state in states}
    return len(places) == 1 and all(state.waits == IN_COLLECTIVE for state in states)
