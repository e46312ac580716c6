"""Results of requests that are answered immediately and run later, and the turns of requests.

    pending = pending_results.new("forward_backward")  # its id is the answer of the POST
    turns.submit(seq_id, pending, start)  # `start()` runs when it is this request's turn
    await pending.wait(seconds)  # retrieve_future

All of this runs in the event loop's thread. `resolve` and `fail` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable

from trainer.serve.bodies import JsonObject
from trainer.serve.wire import PROTOBUF
from verl_like.errors import BatchError, CheckpointError, ConfigError, RolloutError, WeightSyncError

JSON = "application/json"
MOST_READ = 256
"""Results to keep after a client has read them, in case the answer was lost."""
MOST_SEEN = 8192
"""Requests per session whose repeats are recognized."""
NumberedRequest = tuple[str, str, int]
"""What counts requests (a session, a model or a sampler), the name of the number, the number."""


class RequestError(Exception):
    """A request that is rejected with an HTTP status, at once."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def category_of(error: BaseException) -> str:
    """Return the protocol's category of an error: `user` or `server`."""
    users = (ConfigError, BatchError, CheckpointError, RolloutError, RequestError)
    is_users = isinstance(error, users) and not isinstance(error, WeightSyncError)
    return "user" if is_users else "server"


class PendingResult:
    """The result of a request that has not run yet: a body, and its media type."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._future: asyncio.Future[tuple[bytes, str]]
        self._future = asyncio.get_running_loop().create_future()

    def resolve(self, result: bytes | JsonObject) -> None:
        """Set the result; bytes are protobuf. Only the first result counts."""
        is_protobuf = isinstance(result, bytes)
        body = result if isinstance(result, bytes) else json.dumps(result).encode()

        def settle() -> None:
            if not self._future.done():
                self._future.set_result((body, PROTOBUF if is_protobuf else JSON))

        loop = self._future.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle)

    def fail(self, error: BaseException) -> None:
        """Set the error, and whether the user or the server caused it."""
        self.resolve({"error": f"{error}", "category": category_of(error)})

    async def wait(self, seconds: float) -> tuple[bytes, str] | None:
        """Return body and media type; None if there is no result after this time."""
        done, _ = await asyncio.wait([self._future], timeout=seconds)
        return self._future.result() if done else None


class PendingResults:
    """Promises of all sessions by id. Of those that were read, only the newest are kept."""

    def __init__(self) -> None:
        self._open: dict[str, PendingResult] = {}
        self._read: OrderedDict[str, PendingResult] = OrderedDict()
        self._last = 0

    def new(self, session: str) -> PendingResult:
        """Add a pending result to a session."""
        self._last += 1
        pending = PendingResult(f"{session}:request:{self._last}")
        self._open[pending.request_id] = pending
        return pending

    def find(self, request_id: str) -> PendingResult:
        """Return a pending result; raise status 410 if it is gone."""
        pending = self._open.get(request_id) or self._read.get(request_id)
        if pending is None:
            raise RequestError(
                f"the request {request_id!r} is not known, or its result was already read.", 410
            )
        return pending

    def was_read(self, pending: PendingResult) -> None:
        """Mark a result as read: it may be forgotten later."""
        if self._open.pop(pending.request_id, None) is not None:
            self._read[pending.request_id] = pending
        while len(self._read) > MOST_READ:
            self._read.popitem(last=False)

    def end_session(self, session: str) -> None:
        """Fail the pending results of a session, and forget its results."""
        for request_id in [name for name in self._open if name.startswith(f"{session}:")]:
            error = RequestError(f"the session {session} has ended.")
            self._open.pop(request_id).fail(error)


class Repeats:
    """Answers of numbered requests: a repeat gets the same answer, another body is rejected."""

    def __init__(self) -> None:
        self._seen: OrderedDict[NumberedRequest, tuple[bytes, JsonObject]] = OrderedDict()

    def answer(
        self, request: NumberedRequest, content: bytes, make: Callable[[], JsonObject]
    ) -> JsonObject:
        """Return the earlier answer to this request, or `make()` for a new request."""
        digest = hashlib.sha256(content).digest()
        if request not in self._seen:
            self._seen[request] = digest, make()
            while len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)
        known, answer = self._seen[request]
        if known != digest:
            _, name, number = request
            raise RequestError(f"{name} {number} was sent before with another body; use each once.")
        return answer


class Turns:
    """Starts the requests of a model in the order of `seq_id`, from 1."""

    def __init__(self) -> None:
        self.next = 1
        self._waiting: dict[int, tuple[PendingResult | None, Callable[[], None]]] = {}
        self._waits_since = time.monotonic()

    def check(self, seq_id: int) -> None:
        """Reject a request whose turn is over."""
        if seq_id < self.next or seq_id in self._waiting:
            raise RequestError(
                f"seq_id {seq_id} was already used; this model's next one is {self.next}."
            )

    def submit(self, seq_id: int, pending: PendingResult | None, start: Callable[[], None]) -> None:
        """Queue a request until its turn."""
        self._waiting[seq_id] = pending, start
        while self.next in self._waiting:
            _, start = self._waiting.pop(self.next)
            self.next += 1
            self._waits_since = time.monotonic()
            start()

    def skip(self, seq_id: int) -> None:
        """Count a rejected request as done: its client has moved on."""
        if seq_id >= self.next and seq_id not in self._waiting:
            self.submit(seq_id, None, lambda: None)

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
            if pending is not None:
                pending.fail(error)
        self._waiting.clear()
