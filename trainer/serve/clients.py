"""The open sessions of clients, with their models and samplers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.serve.bodies import JsonObject, Natural, page
from trainer.serve.pending import RequestError
from trainer.serve.sampling import ServedSampler
from trainer.serve.training_ops import ServedModel

MAX_SEEN = 8192
"""Number of requests per session for which a repetition is recognized."""
NUMBERED = (
    ("model_id", "seq_id"),
    ("session_id", "model_seq_id"),
    ("session_id", "sampling_session_seq_id"),
    ("sampling_session_id", "seq_id"),
)
"""(scope, number): pairs of fields; a request with both is numbered within the scope."""


@dataclass
class ClientSession:
    """The open models and samplers of one client."""

    session_id: str
    user_metadata: JsonObject
    display_name: str | None
    models: dict[str, ServedModel] = field(default_factory=dict)
    samplers: dict[str, ServedSampler] = field(default_factory=dict)
    answers: dict[tuple[str, str, int], tuple[bytes, JsonObject]] = field(default_factory=dict)
    """Maps a numbered request to (digest of its content, response), oldest first."""
    last_request: float = field(default_factory=time.monotonic)


class Sessions:
    """The open sessions by id; used only in the event loop's thread."""

    def __init__(self) -> None:
        self.open: dict[str, ClientSession] = {}

    def find(self, session_id: str) -> ClientSession:
        """Return the open session with this id; raise status 404 if there is none."""
        if session_id not in self.open:
            raise RequestError(
                f"there is no open session {session_id!r}: it ended, or the server was "
                "restarted. Create a new session.",
                404,
            )
        session = self.open[session_id]
        session.last_request = time.monotonic()
        return session

    def heartbeat(self, session_id: str) -> None:
        """Note that the client is alive; raise status 410 if its session has ended."""
        if session_id not in self.open:
            raise RequestError("the session has ended. Create a new session.", 410)
        self.find(session_id)

    def describe(self, session_id: str) -> JsonObject:
        """Return a session in the protocol's form."""
        session = self.find(session_id)
        return {
            "training_run_ids": [*session.models],
            "sampler_ids": [*session.samplers],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    def list_all(self, limit: Natural = 100, offset: Natural = 0) -> JsonObject:
        """Return a page of the ids of open sessions."""
        return page("sessions", [*self.open], limit, offset)

    def silent_for(self, seconds: float) -> list[ClientSession]:
        """Return the sessions without a request for this long."""
        latest = time.monotonic() - seconds
        return [session for session in self.open.values() if session.last_request <= latest]

    def of(self, name: str) -> ClientSession | None:
        """Return the open session whose id this name is or begins with, or None."""
        session_id = str(name).partition(":")[0]  # bytes in damaged protobuf
        return self.find(session_id) if session_id in self.open else None

    def model(self, model_id: str) -> ServedModel:
        """Return a model in training."""
        session = self.of(model_id)
        if session is None or model_id not in session.models:
            raise _not_open("model", model_id)
        return session.models[model_id]

    def sampler(self, sampler_id: str) -> ServedSampler:
        """Return an open sampler."""
        session = self.of(sampler_id)
        if session is None or sampler_id not in session.samplers:
            raise _not_open("sampler", sampler_id)
        return session.samplers[sampler_id]

    def all_models(self) -> list[ServedModel]:
        """Return the models of all sessions."""
        return [opened for session in self.open.values() for opened in session.models.values()]

    def once(
        self, fields: JsonObject, content: bytes, answer: Callable[[], JsonObject]
    ) -> JsonObject:
        """Run a request; a repeated numbered request gets the response to the first one."""
        numbered = [
            (fields[owner], number, fields[number])
            for owner, number in NUMBERED
            if fields.get(owner) is not None and fields.get(number) is not None
        ]
        session = self.of(numbered[0][0]) if numbered else None
        if session is None:
            return answer()
        request, digest = numbered[0], hashlib.sha256(content).digest()
        if request not in session.answers:
            session.answers[request] = digest, answer()
            while len(session.answers) > MAX_SEEN:
                del session.answers[next(iter(session.answers))]
        known, earlier = session.answers[request]
        if known != digest:
            _, name, number = request
            raise RequestError(
                f"{name} {number} was already sent with different contents. Use each number once."
            )
        return earlier


def _not_open(kind: str, name: str) -> RequestError:
    return RequestError(
        f"there is no open {kind} {name!r}: its session ended, or it was never created. Create it "
        "again.",
        404,
    )
