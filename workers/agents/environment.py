"""What an environment is: a class that answers what a policy says, in a process of its own.

    class Guess(Environment):
        def reset(self, row, rng):
            self.secret = int(rng.integers(1, 21))
            return "Guess my number, 1 to 20."

        def step(self, text):
            if text.strip() == str(self.secret):
                return End(reward=1.0)
            return Turn("higher" if text < str(self.secret) else "lower")

Its other public methods are tools, which the policy may call in place of an answer; so are the
functions that `tools` names. A class with tools and no `step` ends with the first answer that calls
none. A method may be `async`. Nothing here imports torch: environments' processes start with it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random  # loaded before trajectories are forked: numpy itself loads it when it is used

from verl_like.errors import ConfigError
from verl_like.process.sandbox import Sandbox
from verl_like.registry import load_from
from workers.agents.tools import Tool, answer_call, calls_in


@dataclass(frozen=True)
class Turn:
    """What the policy observes, and the reward of what it said."""

    text: str
    reward: float = 0.0


@dataclass(frozen=True)
class End:
    """The end of a trajectory, and the reward of what was said last."""

    reward: float = 0.0


class Environment:
    """One trajectory's counterpart.

        env = Guess(**kwargs)
        observation = env.reset(row, rng)     # None: the row's prompt is all there is to read
        while not isinstance(answer := env.step(text), End):
            text = say(answer.text)

    `rng` is a `numpy.random.Generator`, the same for every sample of a prompt; `self.rng` is the
    sample's own.
    """

    rng: Any

    def reset(self, row: Mapping[str, Any], rng: Any) -> str | None:
        """Begin, with the columns of the data's row."""
        return None

    def step(self, text: str) -> Turn | End:
        """Answer what the policy said."""
        raise NotImplementedError


@dataclass(frozen=True)
class EnvironmentSpec:
    """Which class, which tools, and what their processes may have."""

    path: str = ""
    """FILE.py:CLASS or package.module:CLASS; "": tools alone."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[str] = ()
    """FILE.py:FUNCTION or package.module:FUNCTION of each."""
    sandbox: Sandbox = field(default_factory=Sandbox)

    def load(self) -> Loaded:
        """The class and the functions; a ConfigError names what is no such thing."""
        cls = None
        if self.path:
            cls = _object_at(self.path, "environment")
            _check_class(cls, self.path)
        functions = []
        for number, path in enumerate(self.tools):
            functions.append(Tool.of(_object_at(path, f"tools[{number}]"), f"tools[{number}]"))
        loaded = Loaded(cls, dict(self.kwargs), functions)
        names = [tool.name for tool in loaded.tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"tools: two are called {twice[0]!r}. Rename one.")
        return loaded


@dataclass(frozen=True)
class Loaded:
    """What a spec names."""

    cls: type | None
    kwargs: Mapping[str, Any]
    functions: Sequence[Tool]

    @cached_property
    def tools(self) -> list[Tool]:
        """All that the policy may call: functions, and the environment's methods."""
        return [*self.functions, *[Tool.of(method, "") for method in self._methods()]]

    def _methods(self) -> list[Callable[..., Any]]:
        if self.cls is None:
            return []
        hidden = {"reset", "step"}
        return [
            method
            for name, method in inspect.getmembers(self.cls, inspect.isfunction)
            if not name.startswith("_") and name not in hidden
        ]


def in_full(path: str) -> str:
    """A path whose file is named in full: processes work in folders of their own."""
    file, colon, name = path.rpartition(":")
    if not colon or not file.endswith(".py"):
        return path
    return f"{Path(file).expanduser().absolute()}:{name}"


def _object_at(path: str, key: str) -> Any:
    where, colon, name = path.rpartition(":")
    if not colon:
        where, _, name = path.rpartition(".")
    if not where or not name:
        raise ConfigError(f"{key}={path}: give FILE.py:NAME, or package.module:NAME.")
    return load_from(where, name, key, key)


def _check_class(cls: Any, path: str) -> None:
    if not isinstance(cls, type) or not callable(getattr(cls, "reset", None)):
        raise ConfigError(f"environment={path} is no class with a method `reset`.")
    step = getattr(cls, "step", None)
    if step is None or step is Environment.step:
        return
    try:
        inspect.signature(step).bind(None, "text")
    except TypeError as error:
        raise ConfigError(
            f"environment={path}: step takes the text that was said: {error}."
        ) from error


class Episode:
    """One environment and what it is asked, in the process that runs it."""

    def __init__(self, loaded: Loaded, seeds: tuple[int, int]) -> None:
        """`seeds`: one for the samples of a prompt, one of this sample alone."""
        self._shared, self._own = (np.random.default_rng(seed) for seed in seeds)
        random.seed(seeds[0])
        np.random.seed(seeds[0] % 2**32)
        self._seed = seeds[1]
        self._env: Any = None
        if loaded.cls is not None:
            self._env = loaded.cls(**loaded.kwargs)
            self._env.rng = self._own
        self._tools = {tool.name: tool.bound_to(self._env) for tool in loaded.tools}
        step = getattr(self._env, "step", None)
        self._has_step = (
            step is not None and getattr(step, "__func__", None) is not Environment.step
        )

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The first observation: a text, or None."""
        text = None
        if self._env is not None:
            text = _wait(self._call_reset(row))
        if text is not None and not isinstance(text, str):
            raise TypeError(f"reset returned {_kind(text)}, not a text or None")
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)
        return {"text": text}

    def _call_reset(self, row: Mapping[str, Any]) -> Any:
        reset = self._env.reset
        names = inspect.signature(reset).parameters
        if "row" in names or "rng" in names:
            given = {"row": dict(row), "rng": self._shared}
            return reset(**{name: given[name] for name in names if name in given})
        takes_all = any(one.kind is one.VAR_KEYWORD for one in names.values())
        return reset(**{name: row[name] for name in row if takes_all or name in names})

    def step(self, text: str) -> dict[str, Any]:
        """What is observed after this text: messages, the reward of the text, and if it ends."""
        calls = calls_in(text) if self._tools else []
        if calls:
            answers = [answer_call(call, self._tools, _wait) for call in calls]
            messages = [
                {"role": "tool", "name": call.name, "content": said}
                for call, (said, _) in zip(calls, answers, strict=True)
            ]
            errors = sum(failed for _, failed in answers)
            return {"messages": messages, "reward": 0.0, "calls": len(calls), "errors": errors}
        if not self._has_step:
            return {"end": True, "reward": _finite(getattr(self._env, "reward", 0.0))}
        answer = _wait(self._env.step(text))
        if isinstance(answer, End):
            return {"end": True, "reward": _finite(answer.reward)}
        if not isinstance(answer, Turn):
            raise TypeError(f"step returned {_kind(answer)}, not a Turn or an End")
        if not isinstance(answer.text, str):
            raise TypeError(f"step returned a Turn whose text is {_kind(answer.text)}")
        message = {"role": "user", "content": answer.text}
        return {"messages": [message], "reward": _finite(answer.reward)}


def _wait(value: Any) -> Any:
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _finite(reward: Any) -> float:
    number = float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}")
    return number


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"
