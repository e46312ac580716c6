"""Who uses the server: sessions, their models and their samplers."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from trainer.serve.bodies import CreateSession, Facts, Search
from trainer.serve.checkpoints import now
from trainer.serve.promises import Repeats, RequestError, Turns
from trainer.serve.sampling import Sampler
from trainer.serve.verbs import ServedModel


@dataclass
class OpenModel:
    """A model in training, and the order of its requests."""

    model: ServedModel
    turns: Turns = field(default_factory=Turns)
    repeats: Repeats = field(default_factory=lambda: Repeats("seq_id"))


@dataclass
class OpenSampler:
    """A sampler, and the requests that it has seen."""

    sampler: Sampler
    repeats: Repeats = field(default_factory=lambda: Repeats("seq_id"))


@dataclass
class Session:
    """What one client has open."""

    session_id: str
    user_metadata: Facts
    display_name: str | None
    created_at: str = field(default_factory=lambda: now().isoformat())
    models: dict[str, OpenModel] = field(default_factory=dict)
    samplers: dict[str, OpenSampler] = field(default_factory=dict)
    model_repeats: Repeats = field(default_factory=lambda: Repeats("model_seq_id"))
    sampler_repeats: Repeats = field(default_factory=lambda: Repeats("sampling_session_seq_id"))
    heard: float = field(default_factory=time.monotonic)

    def summary(self) -> Facts:
        """Return the session as a search has it."""
        return {
            "session_id": self.session_id,
            "created_at": self.created_at,
            "owner": "local",
            "project_id": "local",
            "status": {"type": "active"},
            "display_name": self.display_name,
            "user_metadata": self.user_metadata,
        }


class Sessions:
    """The open sessions by id; all of it belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.open: dict[str, Session] = {}

    def begin(self, body: CreateSession) -> Session:
        """Open a session."""
        session = Session(uuid.uuid4().hex[:16], body.user_metadata or {}, body.display_name)
        self.open[session.session_id] = session
        return session

    def find(self, session_id: str) -> Session:
        """Return an open session; another one has status 404."""
        if session_id not in self.open:
            raise RequestError(f"there is no open session {session_id!r}.", 404)
        session = self.open[session_id]
        session.heard = time.monotonic()
        return session

    def find_model(self, model_id: str) -> OpenModel | None:
        """Return a model in training, if there is one of this name."""
        session = self.open.get(str(model_id).partition(":")[0])
        if session is None:
            return None
        session.heard = time.monotonic()
        return session.models.get(model_id)

    def model(self, model_id: str) -> OpenModel:
        """Return a model in training."""
        opened = self.find_model(model_id)
        if opened is None:
            raise RequestError(f"there is no open model {model_id!r}.", 404)
        return opened

    def sampler(self, sampler_id: str) -> OpenSampler:
        """Return an open sampler."""
        session = self.open.get(sampler_id.partition(":")[0])
        if session is None or sampler_id not in session.samplers:
            raise RequestError(f"there is no open sampler {sampler_id!r}.", 404)
        session.heard = time.monotonic()
        return session.samplers[sampler_id]

    def all_models(self) -> list[OpenModel]:
        """Return the models of all sessions."""
        return [opened for session in self.open.values() for opened in session.models.values()]

    def sampled_states(self) -> set[str]:
        """Return the states that samplers of open sessions draw from."""
        samplers = [each for session in self.open.values() for each in session.samplers.values()]
        return {each.sampler.state for each in samplers}

    def search(self, body: Search) -> list[Session]:
        """Return the sessions with this metadata and this id or name, the newest first."""
        words = (body.display_name or "").lower().split()
        found = []
        for session in reversed(self.open.values()):
            shown = (session.display_name or "").lower()
            is_named = bool(words) and all(word in shown for word in words)
            names_none = not words and body.session_id is None
            if body.user_metadata.items() <= session.user_metadata.items() and (
                is_named or names_none or body.session_id == session.session_id
            ):
                found.append(session)
        return found
