"""What the driver has to compute by itself, done while it would only wait for workers.

    spare_time.plan(work)             # what gives metrics, and no worker needs
    ...                               # calls are launched
    spare_time.use()                  # does it, if it is still to do; then the calls are waited for
    metrics = spare_time.result()     # does it now, where nobody had time

The step plans it and takes its result; a stage that waits uses the time, if anything is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from trainer.loop import Metrics


class SpareTime:
    """One piece of work at a time."""

    def __init__(self) -> None:
        """Nothing is planned."""
        self._work: Callable[[], Metrics] | None = None
        self._done: Future[Metrics] = Future()

    def plan(self, work: Callable[[], Metrics]) -> None:
        """To be done by the next `use` or `result`; what was planned before is forgotten."""
        self._work, self._done = work, Future()

    def use(self) -> None:
        """Do it now; an error waits for `result`."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            self._done.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised by `result`, when the calls have ended
            self._done.set_exception(error)

    def result(self) -> Metrics:
        """What it gave; of work that was planned."""
        self.use()
        return self._done.result(timeout=0)
