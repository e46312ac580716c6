"""Work of the driver that no worker waits for, put off until it would only wait for workers.

    deferred.defer(work)           # what gives metrics
    ...                            # calls are launched
    deferred.run()                 # runs it, if it has not run; then the calls are waited for
    metrics = deferred.result()    # runs it here, where no stage has

`PPOTrainer.step` defers it and takes its result; a stage that waits may run it before.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from trainer.loop import Metrics


class DeferredWork:
    """One piece of work at a time."""

    def __init__(self) -> None:
        self._work: Callable[[], Metrics] | None = None
        self._done: Future[Metrics] = Future()

    def defer(self, work: Callable[[], Metrics]) -> None:
        """For the next `run` or `result`; work that was deferred before is forgotten."""
        self._work, self._done = work, Future()

    def run(self) -> None:
        """Run it now; an error waits for `result`."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            self._done.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised by `result`, when the calls have ended
            self._done.set_exception(error)

    def result(self) -> Metrics:
        """The metrics of the work that was deferred last."""
        self.run()
        return self._done.result(timeout=0)
