"""`environment=skyrl_gym:NAME` plays an environment of SkyRL; FILE.py:CLASS as NAME plays a class.

The environment gets the row's columns as SkyRL's `extras`, and `environment.kwargs` as its
configuration. If the rows have no column `reward_spec`, the extra of this name contains the row's
ground truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.agents.adapters import check_id, imported
from workers.agents.environment import EnvironmentAdapter, Observation, TrajectoryEnd
from workers.agents.load_environment import full_path, object_at
from workers.chats import text_of


class SkyRLGym(EnvironmentAdapter):
    """Passes the policy's text on; the observation is the texts of the environment's messages."""

    @classmethod
    def id_in_full(cls, name: str) -> str:
        """Make the file name of a class absolute."""
        return full_path(name)

    @classmethod
    def prepare(cls) -> None:
        """Look up the name, or load the class."""
        gym = imported("skyrl_gym", f"skyrl_gym:{cls.id}", "verl-like[skyrl-gym]")
        if ":" not in cls.id:
            check_id(cls.id, gym.registry, f"skyrl_gym:{cls.id}")
            return
        cls_of_user = object_at(cls.id, "environment")
        gym.register(id=cls.id, entry_point=cls_of_user)

    def reset(self, row: Mapping[str, Any], rng: Any) -> None:
        """Start the environment with the row's prompt."""
        import skyrl_gym
        from omegaconf import OmegaConf

        truth = {"method": "rule", "ground_truth": row.get("ground_truth")}
        extras = {"reward_spec": truth, **row}
        config = OmegaConf.create(dict(self.kwargs))
        self._env = skyrl_gym.make(self.id, env_config=config, extras=extras)
        prompt = row["prompt"]
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        begun, _ = self._env.init(chat)
        if begun != chat:
            raise ValueError(
                "`init` changes the prompt. Write the changed prompt into the rows of the data."
            )

    def step(self, text: str) -> Observation | TrajectoryEnd:
        """Return the texts of the environment's messages."""
        output = self._env.step(text)
        if output.get("postprocessed_action", text) not in (None, text):
            raise ValueError(
                "`step` returned a postprocessed_action that differs from the policy's text; "
                "sampled tokens cannot be edited. Use an environment that leaves the action "
                "unchanged."
            )
        if output["done"]:
            return TrajectoryEnd(output["reward"])
        texts = [text_of(message["content"]) for message in output["observations"]]
        return Observation("\n".join(texts), output["reward"])
