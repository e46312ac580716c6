"""The interface of environments: a class that replies to a policy, in a separate process.

    class Guess(Environment):
        def reset(self, row, rng):
            self.secret = "abcdefghij"[rng.integers(10)]
            return "Guess my letter, a to j."

        def step(self, text):
            if text.strip() == self.secret:
                return TrajectoryEnd(reward=1.0)
            return Observation("later" if text.strip() < self.secret else "earlier")

Other public methods of the class, and the functions in `environment.tools`, are tools that the
policy can call. If a class has tools but no `step`, the first response without a tool call ends the
trajectory. Methods may be `async`. This module does not import torch, because every environment's
process loads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.random  # numpy would load it lazily, and so in every forked process again

from verl_like.registry import Registry
from workers.agents.tools import Tool

IMAGE_MARK = "<image>"
"""The place of an image in an observation's text."""


@dataclass(frozen=True)
class Observation:
    """An environment's reply after which the policy takes another turn.

    Example:

        Observation("Too low. Guess again.", reward=-0.1)

    Args:
        text: the observation that the policy reads next.
        reward: reward of the policy's last text.
        images: paths, bytes or images of PIL, in the places `<image>` of the text, or before it.
    """

    text: str
    reward: float = 0.0
    images: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"the text of an Observation is {shown(self.text)}, not a string")
        if not isinstance(self.images, list | tuple):
            raise TypeError(f"the images of an Observation are {shown(self.images)}, not a list")
        finite_reward(self.reward)
        _ = self.content  # an error is raised here, in the environment's code

    @cached_property
    def content(self) -> str | list[dict[str, str]]:
        """The content of a message: the text, or parts of text and images as `data:` URLs."""
        if not self.images:
            return self.text
        from workers.images import image_url

        texts = self.text.split(IMAGE_MARK)
        if len(texts) == 1:
            texts = ["" for _ in self.images] + texts
        if len(texts) - 1 != len(self.images):
            raise ValueError(
                f"an Observation has {len(self.images)} images, and {len(texts) - 1} places for "
                f"them ({IMAGE_MARK}) in its text"
            )
        parts = [{"type": "text", "text": texts[0]}]
        for image, text in zip(self.images, texts[1:], strict=True):
            parts += [{"type": "image", "url": image_url(image)}, {"type": "text", "text": text}]
        return [part for part in parts if part.get("text") != ""]


@dataclass(frozen=True)
class TrajectoryEnd:
    """An environment's reply that ends the trajectory.

    Example:

        TrajectoryEnd(reward=1.0)                   # solved
        TrajectoryEnd(reward=0.0, truncated=True)   # out of time

    Args:
        reward: reward of the policy's last text.
        truncated: True if a limit, not the task, ended it; counts like `environment.max_turns`.
    """

    reward: float = 0.0
    truncated: bool = False

    def __post_init__(self) -> None:
        finite_reward(self.reward)


class Environment:
    """Base class for environments; each trajectory has its own instance, in a separate process.

        class Guess(Environment):
            def reset(self, row, rng):
                self.number = rng.integers(10)
                return "Guess my number, from 0 to 9."

            def step(self, text):
                if text.strip() == str(self.number):
                    return TrajectoryEnd(reward=1.0)
                return Observation("No. Guess again.")

    The caller's loop, where `generate` is the policy:

        env = Guess(**kwargs)                 # `environment.kwargs`
        observation = env.reset(row, rng)     # None adds nothing to the row's prompt
        reply = env.step(generate(observation))
        while isinstance(reply, Observation):
            reply = env.step(generate(reply.text))

    Override `reset` and `step`. Other public methods are tools, which the policy can call, except
    `get_reward`, static methods and class methods. A class that has tools needs no `step`: the
    first response without a tool call then ends the trajectory, whose reward is `get_reward()`, or
    without this method the attribute `reward`, by default 0.

    Attributes:
        players: names of the trained players, if there are several; each has its own trajectory.
        rng: a `numpy.random.Generator` with a separate seed per sample.
        rng_seed: the seed of `rng`.
    """

    players: ClassVar[Sequence[str]] = ()
    """Names of the trained players, if there are several; each has its own trajectory."""
    rng_seed: int | None = None
    """The seed of `rng`, set for each sample; None draws a random one."""

    @cached_property
    def rng(self) -> Any:
        """A `numpy.random.Generator` with a separate seed per sample, created at its first use."""
        return np.random.default_rng(self.rng_seed)

    def reset(self, row: Mapping[str, Any], rng: Any) -> Any:
        """Start a trajectory; return the first observation, or None to add nothing to the prompt.

        It is a text, or an `Observation` if it has images. With several players, return a dict that
        maps players to their first observations. These players take the first turns. Parameters
        with names of columns get the row's values.

        Args:
            row: the row of the data, with all its columns.
            rng: a `numpy.random.Generator` with the same seed for all samples of a prompt.
        """
        return None

    def step(self, text: str) -> Any:
        """Reply to the policy's text with an `Observation` or a `TrajectoryEnd`.

        With several players, define `step(self, text, player)`, and return a dict that maps players
        to their replies. A player that gets an `Observation` takes its next turn.

        Args:
            text: the text that the policy has generated in this turn.
        """
        raise NotImplementedError


class EnvironmentAdapter(Environment):
    """Base class of environments with an id: `environment=PREFIX:ID`, or FILE.py:CLASS:ID.

        class Level(EnvironmentAdapter):                   # environment=levels.py:Level:7
            def reset(self, row, rng):
                return f"level {self.id}"

    Each configured environment is a subclass with its `id` and `kwargs`.

    Attributes:
        id: the text after the prefix or class, such as `7`.
        kwargs: `environment.kwargs`.
        tools: tools in addition to the class's methods.
    """

    id: ClassVar[str]
    """The text after the prefix or class."""
    kwargs: ClassVar[Mapping[str, Any]]
    """`environment.kwargs`."""
    tools: ClassVar[Sequence[Tool]] = ()
    """Tools in addition to the class's methods."""

    @classmethod
    def id_in_full(cls, name: str) -> str:
        """Return the id with absolute file names, because each process has its own folder."""
        return name

    @classmethod
    def prepare(cls) -> None:
        """Reject an unknown id; called before processes of trajectories are forked.

        The forked processes share the modules that this method imports.
        """


ENVIRONMENT_ADAPTERS: Registry[str] = Registry("adapter of environments")
"""Prefixes for `environment`, such as `gymnasium` in `gymnasium:CartPole-v1`.

    ENVIRONMENT_ADAPTERS.register("mygym")("my_package.adapters:MyGym")     # environment=mygym:task

An entry is the path of an `EnvironmentAdapter`, or of a function (id, kwargs) -> agent.
"""
for _prefix, _class in {
    "gem": "Gem",
    "gymnasium": "Gymnasium",
    "harbor": "Harbor",
    "mcp": "MCP",
    "openenv": "OpenEnv",
    "reasoning_gym": "ReasoningGym",
    "skyrl_gym": "SkyRLGym",
    "textarena": "TextArena",
    "verifiers": "agent",
}.items():
    ENVIRONMENT_ADAPTERS.register(_prefix)(f"workers.agents.adapters.{_prefix}:{_class}")


def finite_reward(reward: Any) -> float:
    """Return a reward as a float; reject a value that is not a finite number."""
    try:
        number = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"the reward is {reward!r:.80}, not a finite number. Return a number, as in "
            "TrajectoryEnd(reward=1.0)"
        )
    return number


def shown(value: Any) -> str:
    """Return the type and the value, for error messages."""
    return f"{type(value).__name__} {value!r:.80}"
