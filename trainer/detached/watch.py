"""Whether the trainers are still there, which nobody would notice during a long generation.

`DetachedTrainer` starts the watch with its models and stops it in the end; a trainer whose process
is gone is raised where the step waits for samples.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from trainer.detached.buffer import ExperienceBuffer
from verl_like.calls.future import gather

PING_S = 2.0
"""Seconds between two rounds of calls."""


class TrainerWatch:
    """A thread that pings every process of some groups."""

    def __init__(self, groups: Iterable[Any], buffer: ExperienceBuffer) -> None:
        """`start` begins; of groups on the same processes, one is asked."""
        self._groups: list[Any] = []
        for group in groups:
            if not any(group.shares_processes_with(other) for other in self._groups):
                self._groups.append(group)
        self._buffer = buffer
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer watch", daemon=True)

    def start(self) -> None:
        """Ping until `stop`, or until a process is gone."""
        self._thread.start()

    def stop(self) -> None:
        """No ping is under way afterwards."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(PING_S):
                gather(*(group.ping.remote() for group in self._groups))
        except BaseException as error:  # noqa: BLE001 - raised where the trainer waits for samples
            self._buffer.fail(error)
