"""usage: verl-like check-environment FILE.py:CLASS [--say TEXT ...] [--turns N]
           [--row JSON] [--kwargs JSON] [--tools FILE.py:FUNCTION ...]

Plays an environment without a model: each TEXT is what the policy says in a turn, the last one
again and again. It says what is observed, what a step costs, and whether the same seed plays the
same game, alone and beside another one. What is wrong ends it with exit code 1.

  verl-like check-environment guess.py:Guess --say 5 3 8
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from verl_like.errors import ConfigError
from workers.agents.environment import EnvironmentSpec, in_full
from workers.agents.host import EnvironmentHost

STEP_S = 30.0
"""Longest time for an answer."""


@dataclass
class Played:
    """What a trajectory observed."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """What it failed of; "" if it did not."""
        return str(self.answers[-1].get("failed", ""))

    @property
    def has_ended(self) -> bool:
        """Whether the environment ended it."""
        return bool(self.answers[-1].get("end"))


def main(arguments: Sequence[str]) -> None:
    """Play, and print what was found."""
    parser = argparse.ArgumentParser("verl-like check-environment", add_help=False)
    parser.add_argument("path")
    parser.add_argument("--say", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--row", type=_object, default={})
    parser.add_argument("--kwargs", type=_object, default={})
    parser.add_argument("--tools", nargs="+", default=[])
    options = parser.parse_args(arguments)
    tools = [in_full(path) for path in options.tools]
    spec = EnvironmentSpec(in_full(options.path), options.kwargs, tools)
    row = {"prompt": "", **options.row}
    with closing(EnvironmentHost(spec, STEP_S)) as host:
        lines, problems = check(host, row, options.say, options.turns)
    print(*lines, sep="\n")
    if problems:
        print(*[f"error: {problem}" for problem in problems], sep="\n", file=sys.stderr)
        sys.exit(1)


def check(
    host: EnvironmentHost, row: dict[str, Any], said: Sequence[str], turns: int
) -> tuple[list[str], list[str]]:
    """Lines about the environment, and what is wrong with it."""
    tools = [tool["function"]["name"] for tool in host.tools]
    lines = [f"tools: {', '.join(tools)}"] if tools else []
    (first,) = play(host, [0], row, said, turns)
    lines += _story(first, said)
    if first.problem:
        return lines, [first.problem]

    again, other = play(host, [0, 1], row, said, turns)
    problems = []
    if again.answers != first.answers:
        turn = next(
            (
                number
                for number, pair in enumerate(zip(first.answers, again.answers, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(first.answers), len(again.answers)),
        )
        problems.append(
            f"the same seed plays another game, first in answer {turn}: draw from the rng that "
            "reset gets, or from self.rng, and from no clock, file or other process."
        )
    else:
        lines.append("the same seed plays the same game, alone and beside another")
    if other.problem:
        problems.append(other.problem)
    if other.answers[0] != first.answers[0]:
        problems.append(
            "two samples of a prompt begin with different observations, so they cannot be "
            "compared: in reset draw from its rng alone."
        )
    else:
        lines.append("the samples of a prompt begin alike")
    return lines, problems


def play(
    host: EnvironmentHost, samples: list[int], row: dict[str, Any], said: Sequence[str], turns: int
) -> list[Played]:
    """These samples of one prompt, side by side."""
    played = {number: Played() for number in samples}
    asked = {}
    for number in samples:
        host.open(number, (0, 1 + number), row)
        asked[number] = time.monotonic()
    while asked:
        for number, answer in host.answers(1.0):
            one = played[number]
            one.answers.append(answer)
            one.seconds.append(time.monotonic() - asked.pop(number))
            if one.problem or one.has_ended or len(one.answers) > turns:
                host.end(number)
                continue
            asked[number] = time.monotonic()
            host.say(number, said[min(len(one.answers), len(said)) - 1])
    return list(played.values())


def _story(played: Played, said: Sequence[str]) -> list[str]:
    lines = []
    for turn, (answer, seconds) in enumerate(zip(played.answers, played.seconds, strict=True)):
        heard = _heard(answer)
        cost = f"{1000 * seconds:.1f} ms"
        if turn == 0:
            lines.append(f"reset ({cost}): {heard}")
        else:
            lines.append(f"{said[min(turn, len(said)) - 1]!r} ({cost}): {heard}")
    if not played.problem and not played.has_ended:
        lines.append(f"it has not ended after {len(played.answers) - 1} turns")
    return lines


def _heard(answer: dict[str, Any]) -> str:
    if "failed" in answer:
        return "failed"
    if "text" in answer:
        return "the prompt alone" if answer["text"] is None else repr(answer["text"])
    reward = f"reward {answer['reward']:g}"
    if answer.get("end"):
        return f"end, {reward}"
    return ", ".join([*(repr(one["content"]) for one in answer["messages"]), reward])


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{text} is no JSON object, such as '{{\"level\": 3}}'.")
    return found
