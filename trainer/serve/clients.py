"""The open sessions of clients, with their models and samplers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from trainer.serve.bodies import JsonObject
from trainer.serve.pending import Repeats, RequestError
from trainer.serve.sampling import ServedSampler
from trainer.serve.training_ops import ServedModel


@dataclass
class ClientSession:
    """The open models and samplers of one client."""

    session_id: str
    user_metadata: JsonObject
    display_name: str | None
    models: dict[str, ServedModel] = field(default_factory=dict)
    samplers: dict[str, ServedSampler] = field(default_factory=dict)
    repeats: Repeats = field(default_factory=Repeats)
    last_request: float = field(default_factory=time.monotonic)


class Sessions:
    """The open sessions by id; only the event loop's thread uses them."""

    def __init__(self) -> None:
        self.open: dict[str, ClientSession] = {}

    def find(self, session_id: str) -> ClientSession:
        """Return an open session; raise status 404 if there is none of this id."""
        if session_id not in self.open:
            raise RequestError(f"there is no open session {session_id!r}.", 404)
        session = self.open[session_id]
        session.last_request = time.monotonic()
        return session

    def find_model(self, model_id: str) -> ServedModel | None:
        """Return a model in training; None if there is none of this name."""
        session = self.open.get(str(model_id).partition(":")[0])
        if session is None:
            return None
        session.last_request = time.monotonic()
        return session.models.get(model_id)

    def model(self, model_id: str) -> ServedModel:
        """Return a model in training."""
        opened = self.find_model(model_id)
        if opened is None:
            raise RequestError(f"there is no open model {model_id!r}.", 404)
        return opened

    def sampler(self, sampler_id: str) -> ServedSampler:
        """Return an open sampler."""
        session = self.open.get(sampler_id.partition(":")[0])
        if session is None or sampler_id not in session.samplers:
            raise RequestError(f"there is no open sampler {sampler_id!r}.", 404)
        session.last_request = time.monotonic()
        return session.samplers[sampler_id]

    def all_models(self) -> list[ServedModel]:
        """Return the models of all sessions."""
        return [opened for session in self.open.values() for opened in session.models.values()]

    def sampled_states(self) -> set[str]:
        """Return the states that samplers of open sessions draw from."""
        sessions = self.open.values()
        return {sampler.state for session in sessions for sampler in session.samplers.values()}
