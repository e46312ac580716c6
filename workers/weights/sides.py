"""The two sides of a sync, which wait for each other: what their ranks report, and its errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from verl_like.calls.future import gather
from verl_like.errors import VerlLikeError, WeightSyncError

ALONE_S = 3.0
"""How long one side of a sync may go on after the other has failed: it waits in vain."""


def raise_errors(reports: Sequence[SyncReport], version: int) -> None:
    """What the ranks have refused, or could not do, as one error."""
    errors = [report.error for report in reports if report.error]
    if errors:
        was_voted = all(report.voted for report in reports)
        kind = WeightsRefusedError if was_voted else WeightSyncError
        raise kind(f"version {version} was not taken over: " + "; ".join(errors))


@dataclass(frozen=True)
class SyncReport:
    """One rank's part of a sync: why it refused, the bytes it moved, the time of their hashes."""

    error: str | None = None
    num_bytes: int = 0
    hash_s: float = 0.0
    voted: bool = True
    """It came as far as the vote: nobody was missing, and nothing broke off."""


class WeightsRefusedError(WeightSyncError):
    """Every rank was there, and one has refused what it got."""


class InAThread:
    """The future of a blocking call, in a thread that nobody has to wait for."""

    def __init__(self, name: str, call: Callable[..., Any], *arguments: Any) -> None:
        self._name, self._future = name, Future[Any]()
        thread = threading.Thread(target=self._run, args=(call, arguments), daemon=True)
        thread.name = f"weight sync: {name}"
        thread.start()

    def _run(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self._future.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._future.set_exception(error)

    def get(self, timeout: float | None = None) -> Any:
        """What the call returns."""
        return self._future.result(timeout)

    def is_done(self, timeout: float) -> bool:
        """Whether the call has ended, for which it is waited at most so many seconds."""
        return bool(wait([self._future], timeout).done)

    def __str__(self) -> str:
        return self._name


class Side:
    """The call of one side of a sync, for `gather`.

    Where a rank waited for another in vain, the side has failed: the other one is waited for no
    longer than after an exception.
    """

    def __init__(self, future: Any, version: int, give_up: Callable[[], object]) -> None:
        """`future` is of the reports of its ranks, which wait for nobody for long.

        `give_up` has the other side told where this one has failed.
        """
        self._future, self._version, self._give_up = future, version, give_up
        future.gives_up_soon = True
        self.reports: list[SyncReport] | None = None
        self._waiting: InAThread | None = None

    def wait_from_now(self) -> None:
        """In a thread, so that a failure is told while this one makes the other side's call."""
        self._waiting = InAThread(str(self), self._reports)

    def get(self, timeout: float | None = None) -> list[SyncReport]:
        """The reports, if all ranks came as far as the vote."""
        if self._waiting is None:
            return self._reports(timeout)
        reports: list[SyncReport] = self._waiting.get(timeout)
        return reports

    def _reports(self, timeout: float | None = None) -> list[SyncReport]:
        try:
            self.reports = reports = self._future.get(timeout)
            if not all(report.voted for report in reports):
                raise_errors(reports, self._version)
        except Exception:
            with suppress(VerlLikeError):  # the sender may be the one that is gone
                self._give_up()
            raise
        return reports

    def __str__(self) -> str:
        return str(self._future)


def reports_of_sides(sides: Sequence[Side]) -> list[SyncReport]:
    """Those of both sides, bad ones as well; an error where one side has none."""
    try:
        gather(*sides, grace_s=ALONE_S)
    except WeightSyncError:
        if any(side.reports is None for side in sides):
            raise
    return [report for side in sides for report in side.reports or ()]
