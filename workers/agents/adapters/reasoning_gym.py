"""`environment=reasoning_gym:NAME` asks questions of a Reasoning Gym generator and scores answers.

The answer is the text between the last <answer> and </answer>, or the whole response.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.agents.adapters import check_id, imported, seed_from
from workers.agents.environment import EnvironmentAdapter, TrajectoryEnd


class ReasoningGym(EnvironmentAdapter):
    """An environment of one turn; all samples of a prompt get the same question."""

    @classmethod
    def prepare(cls) -> None:
        """Create one question, so that the generator checks its settings."""
        setting = f"reasoning_gym:{cls.id}"
        factory = imported("reasoning_gym.factory", setting, "verl-like[reasoning-gym]")
        check_id(cls.id, factory.DATASETS, setting)
        factory.create_dataset(cls.id, size=1, seed=0, **cls.kwargs)[0]

    def reset(self, row: Mapping[str, Any], rng: Any) -> str:
        """Return a question."""
        import reasoning_gym

        seed = seed_from(rng)
        self._data = reasoning_gym.create_dataset(self.id, size=1, seed=seed, **self.kwargs)
        self._entry = self._data[0]
        return str(self._entry["question"])

    def step(self, text: str) -> TrajectoryEnd:
        """Return the score of the answer."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(text)
        reply = text.strip() if answer is None else answer
        return TrajectoryEnd(self._data.score_answer(answer=reply, entry=self._entry))
