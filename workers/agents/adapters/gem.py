"""`environment=gem:ID` plays an environment of GEM, such as `gem:game:GuessTheNumber-v0-easy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.agents.adapters import check_id, imported, seed_from
from workers.agents.environment import EnvironmentAdapter, Observation, TrajectoryEnd


class Gem(EnvironmentAdapter):
    """Passes the policy's text to the environment, whose observation is a text."""

    @classmethod
    def prepare(cls) -> None:
        """Check that the id exists."""
        registry = imported("gem.envs.registration", f"gem:{cls.id}", "verl-like[gem]")
        check_id(cls.id, registry.ENV_REGISTRY, f"gem:{cls.id}")

    def reset(self, row: Mapping[str, Any], rng: Any) -> str:
        """Start the environment, and return its instructions."""
        import gem

        self._env = gem.make(self.id, **self.kwargs)
        observation, _ = self._env.reset(seed=seed_from(rng))
        return str(observation)

    def step(self, text: str) -> Observation | TrajectoryEnd:
        """Return the environment's reply."""
        observation, reward, terminated, truncated, _ = self._env.step(text)
        if terminated or truncated:
            return TrajectoryEnd(float(reward), truncated=not terminated)
        return Observation(observation, float(reward))
