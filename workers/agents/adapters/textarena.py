"""`environment=textarena:ID` plays a single-player game of TextArena."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_like.errors import ConfigError
from workers.agents.adapters import check_id, imported, seed_from
from workers.agents.environment import EnvironmentAdapter, Observation, TrajectoryEnd


class TextArena(EnvironmentAdapter):
    """Each observation has what the game wrote since the last turn; only the end has a reward."""

    @classmethod
    def prepare(cls) -> None:
        """Start the game once, to reject games that lack files or need a second player."""
        setting = f"textarena:{cls.id}"
        textarena = imported("textarena", setting, "verl-like[textarena]")
        registry = imported("textarena.envs.registration", setting, "verl-like[textarena]")
        check_id(cls.id, registry.ENV_REGISTRY, setting)
        try:
            textarena.make(cls.id, **cls.kwargs).reset(num_players=1, seed=0)
        except Exception as error:  # noqa: BLE001 - games check their players in different ways
            raise ConfigError(
                f"environment={setting} cannot start with one player: "
                f"{' '.join(str(error).split())[:300]}"
            ) from error

    def reset(self, row: Mapping[str, Any], rng: Any) -> str:
        """Return the game's rules and its first state."""
        import textarena

        self._game = textarena.make(self.id, **self.kwargs)
        self._state = self._game
        while isinstance(self._state, textarena.Wrapper):
            self._state = self._state.env  # wrappers repeat the whole game in every turn
        self._game.reset(num_players=1, seed=seed_from(rng))
        return self._observed()

    def step(self, text: str) -> Observation | TrajectoryEnd:
        """Play the policy's text."""
        is_over, _ = self._game.step(action=text)
        if is_over:
            rewards, _ = self._game.close()
            return TrajectoryEnd(rewards[0])
        return Observation(self._observed())

    def _observed(self) -> str:
        player, messages = self._state.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender != player).strip()
