"""Results of requests that are answered now and run later, and the order in which they run.

    pending = pending_results.new(model_id)         # its id is the answer of the POST
    turns.submit(seq_id, pending, start)            # `start()` runs when it is this request's turn
    await pending.wait(seconds)                     # retrieve_future

All of this runs in the event loop's thread. `resolve` and `fail` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count
from typing import Any

from starlette.responses import Response

from trainer.serve.bodies import PROTOBUF, JsonObject
from verl_like.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    RolloutError,
    VerlLikeError,
    WorkerDiedError,
)

REQUEST_ID = re.compile(r"[0-9a-f]{16}(:(train|sample):-?\d+)?:request:\d+")
MAX_READ = 256
"""Number of results to keep after a client has read them, in case the response was lost."""


class RequestError(VerlLikeError):
    """Rejects a request, with this HTTP status if the request is not in the queue yet."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class PendingResult:
    """The future result of a request, which answers the client's polls."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._future: Future[Response] = Future()

    def resolve(self, result: bytes | JsonObject) -> None:
        """Set the result; bytes are protobuf. Only the first result counts."""
        body = result if isinstance(result, bytes) else json.dumps(result, allow_nan=False)
        kind = PROTOBUF if isinstance(result, bytes) else "application/json"
        with suppress(InvalidStateError):
            self._future.set_result(Response(body, media_type=kind))

    def fail(self, error: BaseException) -> None:
        """Answer with the error and its category: the user or the server caused it."""
        users = (ConfigError, BatchError, CheckpointError, RolloutError, RequestError)
        is_users = isinstance(error, users) and not isinstance(error, WorkerDiedError)
        category = "user" if is_users else "server"
        self.resolve({"error": f"{error}", "category": category})

    async def wait(self, seconds: float) -> Response | None:
        """Return the result; None if there is none after this many seconds."""
        future = asyncio.wrap_future(self._future)
        done, _ = await asyncio.wait([future], timeout=seconds)
        return future.result() if done else None


class PendingResults:
    """The pending results of all sessions by id; of results already read, only the newest."""

    def __init__(self) -> None:
        self._open: dict[str, PendingResult] = {}
        self._read: dict[str, PendingResult] = {}
        self._numbers = count(1)

    def new(self, owner: str) -> PendingResult:
        """Add a pending result to a session, model or sampler."""
        pending = PendingResult(f"{owner}:request:{next(self._numbers)}")
        self._open[pending.request_id] = pending
        return pending

    def find(self, request_id: Any) -> PendingResult:
        """Return a pending result; raise status 410 if it is gone, 404 if it never existed."""
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r:.80} is not the id of a request.")
        pending = self._open.get(request_id) or self._read.get(request_id)
        if pending is None and not REQUEST_ID.fullmatch(request_id):
            raise RequestError(f"this server never gave the request_id {request_id!r:.80}.", 404)
        if pending is None:
            raise RequestError(
                f"the request {request_id!r} is not known: its result was read before, its session "
                "has ended, or the server was restarted.",
                410,
            )
        return pending

    def was_read(self, pending: PendingResult) -> None:
        """Mark a result as read, so that it may be forgotten later."""
        if self._open.pop(pending.request_id, None) is not None:
            self._read[pending.request_id] = pending
        while len(self._read) > MAX_READ:
            del self._read[next(iter(self._read))]

    def end_session(self, session: str) -> None:
        """Fail the pending results of a session, and forget its results that nobody has read."""
        for request_id in [name for name in self._open if name.startswith(f"{session}:")]:
            error = RequestError(f"the session {session} has ended.")
            self._open.pop(request_id).fail(error)


class RequestOrder:
    """Starts the requests of a model in the order of `seq_id`, from 1."""

    def __init__(self) -> None:
        self.next = 1
        self._waiting: dict[int, tuple[PendingResult, Callable[[], None]]] = {}
        self._waits_since = 0.0
        """Time since when requests wait and none has started."""

    def check(self, seq_id: int) -> None:
        """Reject a request whose turn has passed."""
        if seq_id < self.next or seq_id in self._waiting:
            raise RequestError(
                f"seq_id {seq_id} was already used; this model's next one is {self.next}."
            )

    def submit(self, seq_id: int, pending: PendingResult, start: Callable[[], None]) -> None:
        """Queue a request until its turn."""
        if not self._waiting:
            self._waits_since = time.monotonic()
        self._waiting[seq_id] = pending, start
        while self.next in self._waiting:
            _, start = self._waiting.pop(self.next)
            self.next += 1
            self._waits_since = time.monotonic()
            start()

    def skip(self, seq_id: int) -> None:
        """Count the `seq_id` of a rejected request as used: the client continues with the next."""
        if seq_id >= self.next and seq_id not in self._waiting:
            self.submit(seq_id, PendingResult(""), lambda: None)

    def give_up(self, seconds: float) -> None:
        """Fail requests that have waited this long for a lower `seq_id`."""
        if not self._waiting or time.monotonic() - self._waits_since < seconds:
            return
        missing, self.next = self.next, max(self._waiting) + 1
        error = RequestError(
            f"seq_id {missing} did not arrive within {seconds:g} s, and later requests of this "
            f"model wait for it. They are dropped; the next is {self.next}."
        )
        for pending, _ in self._waiting.values():
            pending.fail(error)
        self._waiting.clear()
