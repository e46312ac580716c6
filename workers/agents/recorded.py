"""Recorded answers instead of environments: a trajectory is replayed against them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from workers.agents.host import Kind

RECORDED = "recorded_answers"
"""Column with the environment's answers to each row's trajectory, in order."""
OVER = {"failed": "no further answer was recorded", "reason": "environment"}


class RecordedHost:
    """Has the interface of `EnvironmentHost`; a trajectory's row contains its answers."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        """Create the host; a recorded trajectory is played without other players."""
        self.kinds = {name: replace(kind, players=[]) for name, kind in kinds.items()}
        self._left: dict[int, Iterator[Mapping[str, Any]]] = {}
        self._asked: list[int] = []

    def open(self, number: int, seeds: tuple[int, int], row: Mapping[str, Any]) -> None:
        """Start with the first answer."""
        self._left[number] = iter(row[RECORDED])
        self._asked.append(number)

    def say(self, number: int, text: str, delay_s: float = 0.0, **facts: Any) -> None:
        """Request the next answer, whatever the policy's text."""
        self._asked.append(number)

    def answers(self, seconds: float) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the requested answers."""
        numbers, self._asked = self._asked, []
        for number in numbers:
            yield number, next(self._left[number], OVER)

    def busy_s(self, number: int) -> float:
        """Return 0, because no environment works."""
        return 0.0

    def kill(self, number: int) -> None:
        """Do nothing: there is no process."""

    def end(self, number: int) -> None:
        """Do nothing: there are no resources."""
