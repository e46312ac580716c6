"""`environment=gymnasium:ID` plays an environment of Gymnasium through text.

The observation is written as JSON. If the environment has a text rendering (`render_mode="ansi"`),
the rendering follows, with highlighted letters in brackets. The action is read from the last
number, or numbers, in the policy's text. A text without valid numbers takes no step; the reply
describes the valid actions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from verl_like.errors import ConfigError
from workers.agents.adapters import check_id, imported, seed_from
from workers.agents.environment import EnvironmentAdapter, Observation, TrajectoryEnd

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE]-?\d+)?")
HIGHLIGHTED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m")
BRACKETS = r"[\1]"


class Gymnasium(EnvironmentAdapter):
    """Converts observations to text, and text to actions."""

    render: Mapping[str, Any]

    @classmethod
    def prepare(cls) -> None:
        """Create the environment once, and reject action spaces that do not consist of numbers."""
        gymnasium = imported("gymnasium", f"gymnasium:{cls.id}", "verl-like[gymnasium]")
        module, _, name = cls.id.rpartition(":")
        if module:
            imported(module, f"gymnasium:{cls.id}", install="")
        check_id(name, gymnasium.registry, f"gymnasium:{cls.id}")
        with gymnasium.make(cls.id, **cls.kwargs) as env:
            draws = "ansi" in (env.metadata.get("render_modes") or ())
            shape, kind = env.action_space.shape, type(env.action_space).__name__
        if shape is None or kind == "Text":
            raise ConfigError(
                f"environment=gymnasium:{cls.id}: an action of its space {kind} is not a list of "
                "numbers. Write an environment class whose `step` turns text into an action."
            )
        cls.render = {"render_mode": "ansi"} if draws else {}

    def reset(self, row: Mapping[str, Any], rng: Any) -> str:
        """Return the first observation, and a description of the valid actions."""
        import gymnasium

        self._env = gymnasium.make(self.id, **{**self.render, **self.kwargs})
        observation, _ = self._env.reset(seed=seed_from(rng))
        return f"{self._shown(observation)}\n{self._ask()}"

    def step(self, text: str) -> Observation | TrajectoryEnd:
        """Take the action that the last numbers of the text describe."""
        import numpy as np

        space: Any = self._env.action_space
        size = int(np.prod(space.shape))
        numbers = [float(number) for number in NUMBER.findall(text)[-size:]]
        if len(numbers) < size or not np.isfinite(numbers).all():
            return Observation(self._ask())
        action: Any = np.array(numbers).reshape(space.shape).astype(space.dtype)
        action = action if space.shape else action[()]
        if not space.contains(action):
            return Observation(self._ask())
        observation, reward, terminated, truncated, _ = self._env.step(action)
        if terminated or truncated:
            return TrajectoryEnd(float(reward), truncated=not terminated)
        return Observation(self._shown(observation), float(reward))

    def _ask(self) -> str:
        space: Any = self._env.action_space
        if space.shape:
            return f"Say {' x '.join(map(str, space.shape))} numbers of {space}."
        return f"Say a number from {space.start} to {space.start + space.n - 1}."

    def _shown(self, observation: Any) -> str:
        shown = json.dumps(observation, default=lambda array: array.tolist())
        if self._env.render_mode != "ansi":
            return shown
        return f"{shown}\n{HIGHLIGHTED.sub(BRACKETS, str(self._env.render())).strip()}"
