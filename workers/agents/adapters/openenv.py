"""`environment=openenv:URL` plays an environment on an OpenEnv server, one session per trajectory.

If actions have exactly one required field, and it is a text, the policy's text is its value.
Otherwise the policy writes an action as JSON. If an observation has a single field, and it is a
text, the policy reads this text, otherwise the observation as JSON.
"""

from __future__ import annotations

import json
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from verl_like.errors import ConfigError
from workers.agents.adapters import imported, seed_from
from workers.agents.environment import EnvironmentAdapter, Observation, TrajectoryEnd

CONNECT_S = 10.0
NOT_OBSERVED = {"done", "reward", "metadata"}


class OpenEnv(EnvironmentAdapter):
    """Plays one session over the server's WebSocket."""

    field: str
    """The action's field for the policy's text, or "" if the policy writes JSON."""
    fields: Sequence[str]

    @classmethod
    def prepare(cls) -> None:
        """Request the schema of the environment's actions."""
        imported("websockets", f"openenv:{cls.id}", "verl-like[openenv]")
        try:
            with urllib.request.urlopen(f"{cls.id}/schema", timeout=CONNECT_S) as answer:
                action = json.load(answer)["action"]
        except (OSError, ValueError, LookupError) as error:
            raise ConfigError(
                f"environment=openenv:{cls.id}: {cls.id}/schema does not reply like an OpenEnv "
                f"server: {error!r}"
            ) from error
        fields = action.get("properties", {})
        needed = [name for name in action.get("required", ()) if name in fields]
        has_one_text = len(needed) == 1 and fields[needed[0]].get("type") == "string"
        cls.fields = list(fields)
        cls.field = needed[0] if has_one_text else ""

    def reset(self, row: Mapping[str, Any], rng: Any) -> str:
        """Connect, and start an episode with a seed."""
        from websockets.sync.client import connect

        address = f"ws{self.id.removeprefix('http')}/ws"
        session = ExitStack()
        weakref.finalize(self, session.close)
        self._socket = session.enter_context(
            connect(address, open_timeout=CONNECT_S, max_size=None)
        )
        return _shown(self._ask("reset", {"seed": seed_from(rng), **self.kwargs}))

    def step(self, text: str) -> Observation | TrajectoryEnd:
        """Send the policy's text as an action."""
        if self.field:
            action = {self.field: text}
        else:
            try:
                action = json.loads(text)
            except (ValueError, RecursionError):
                action = None
            if not isinstance(action, dict):
                return Observation(
                    f"error: an action is a JSON object with {', '.join(self.fields)}"
                )
        reply = self._ask("step", action)
        reward = reply.get("reward") or 0.0
        return TrajectoryEnd(reward) if reply.get("done") else Observation(_shown(reply), reward)

    def _ask(self, kind: str, data: Any) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv())
        if answer["type"] != "observation":
            raise RuntimeError(f"the server replies to {kind} with {answer!r:.300}")
        data_of_reply: dict[str, Any] = answer["data"]
        return data_of_reply


def _shown(reply: Mapping[str, Any]) -> str:
    observed = {
        name: value for name, value in reply["observation"].items() if name not in NOT_OBSERVED
    }
    texts = [value for value in observed.values() if isinstance(value, str)]
    return texts[0] if len(observed) == len(texts) == 1 else json.dumps(observed)
