"""usage: verl-like check-environment FILE.py:CLASS|PREFIX:ID [--say TEXT ...]
           [--max-turns N] [--row JSON] [--kwargs JSON]
           [--tools FILE.py:FUNCTION ...] [--step-timeout-s SECONDS]

Plays an environment without a model:

  verl-like check-environment guess.py:Guess --say 5 3 8

PREFIX:ID is an environment of another package, such as gymnasium:FrozenLake-v1.
The command prints the observations, the time per step, and the reward at the
end. It checks that the same seed gives the same trajectory, even when two run
concurrently. If the environment raises, is late, does not end or is otherwise
wrong, the exit code is 1.

  --say TEXT ...              the policy's turns; the last one is repeated
                              (default: 1 2 3)
  --max-turns N               turns after which it must have ended (default: 8)
  --step-timeout-s SECONDS    time for a reply (default: 30)
  --row JSON                  the prompt's row
  --kwargs JSON               arguments of the environment
  --tools FILE.py:FUNCTION    functions that the policy can call
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_like.errors import ConfigError
from verl_like.files import parse_json
from verl_like.terminal import usage_text
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec, full_path
from workers.chats import texts_of


@dataclass
class Playthrough:
    """An environment's replies in one trajectory."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    speakers: list[str] = field(default_factory=list)
    """The players who speak next, if the environment has several."""

    @property
    def problem(self) -> str:
        """The reason why the trajectory failed, or ""."""
        return str(self.answers[-1].get("failed", ""))

    @property
    def has_ended(self) -> bool:
        """True if the environment ended the trajectory."""
        last = self.answers[-1]
        return not self.speakers if "players" in last else bool(last.get("end"))

    @property
    def reward(self) -> float:
        """The sum of the rewards of all turns."""
        by_player = (answer.get("players", {"": answer}) for answer in self.answers)
        answers = (answer for players in by_player for answer in players.values())
        return float(sum(answer.get("reward", 0.0) for answer in answers))


def main(arguments: Sequence[str]) -> None:
    """Play the environment, and print the findings."""
    parser = argparse.ArgumentParser(
        "verl-like check-environment", usage_text(__doc__), add_help=False
    )
    parser.add_argument("path")
    parser.add_argument("--say", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--max-turns", type=_above_0, default=8)
    parser.add_argument("--step-timeout-s", type=_above_0, default=30.0)
    parser.add_argument("--row", type=json_object, default={})
    parser.add_argument("--kwargs", type=json_object, default={})
    parser.add_argument("--tools", nargs="+", default=[])
    options = parser.parse_args(arguments)
    tools = [full_path(path) for path in options.tools]
    spec = EnvironmentSpec(full_path(options.path), options.kwargs, tools)
    row = {"prompt": "", **options.row}
    with closing(EnvironmentHost(spec, options.step_timeout_s)) as host:
        lines, problems = check(host, row, options.say, options.max_turns)
    print(*lines, sep="\n")
    if problems:
        print(*[f"error: {problem}" for problem in problems], sep="\n", file=sys.stderr)
        sys.exit(1)


def check(
    host: EnvironmentHost, row: dict[str, Any], texts: Sequence[str], turns: float
) -> tuple[list[str], list[str]]:
    """Return lines about the environment, and its problems."""
    tools = [tool["function"]["name"] for tool in host.tools]
    lines = [f"tools: {', '.join(tools)}"] if tools else []
    (first,) = play(host, [0], row, texts, turns)
    lines += _story(first, texts)
    if first.problem:
        return lines, [first.problem]

    again, other = play(host, [0, 1], row, texts, turns)
    problems = []
    if not first.has_ended:
        problems.append(
            f"the trajectory has not ended after {len(first.answers) - 1} turns. Return a "
            "TrajectoryEnd, raise --max-turns, or --say what ends it. If environment.max_turns "
            f"ended it there, its reward would be {first.reward:g}."
        )
    if again.answers != first.answers:
        replies = enumerate(zip(first.answers, again.answers, strict=False))
        shorter = min(len(first.answers), len(again.answers))
        turn = next((number for number, (a, b) in replies if a != b), shorter)
        problems.append(
            f"the same seed gives a different trajectory from reply {turn} on. Use only the rng "
            "that reset receives, or self.rng, and no clock, file or other process."
        )
    else:
        lines.append("the same seed gives the same trajectory, even next to a concurrent one")
    if other.problem:
        problems.append(other.problem)
    if other.answers[0] != first.answers[0]:
        problems.append(
            "two samples of a prompt begin with different observations, so they cannot be "
            "compared. In reset, use only its rng."
        )
    else:
        lines.append("all samples of a prompt start with the same observation")
    return lines, problems


def play(
    host: EnvironmentHost,
    samples: list[int],
    row: dict[str, Any],
    texts: Sequence[str],
    turns: float,
) -> list[Playthrough]:
    """Play these samples of one prompt, concurrently."""
    played = {number: Playthrough() for number in samples}
    sent_at = {}
    for number in samples:
        host.open(number, (0, 1 + number), row)
        sent_at[number] = time.monotonic()
    while sent_at:
        for number, answer in host.answers(1.0):
            trajectory = played[number]
            for player, of_player in answer.get("players", {"": answer}).items():
                reject_ids(of_player.get("request", {}))
                if player and "end" not in of_player:
                    trajectory.speakers.append(player)
            trajectory.answers.append(answer)
            trajectory.seconds.append(time.monotonic() - sent_at.pop(number))
            if trajectory.problem or trajectory.has_ended or len(trajectory.answers) > turns:
                host.end(number)
                continue
            sent_at[number] = time.monotonic()
            player = trajectory.speakers.pop(0) if trajectory.speakers else ""
            host.say(number, texts[min(len(trajectory.answers), len(texts)) - 1], player)
    return list(played.values())


def _story(played: Playthrough, texts: Sequence[str]) -> list[str]:
    """Return a line per turn of a trajectory, with its time, and the time of a step."""
    lines = []
    for turn, (answer, seconds) in enumerate(zip(played.answers, played.seconds, strict=True)):
        observed = reply_text(answer)
        cost = f"{1000 * seconds:.1f} ms"
        if turn == 0:
            lines.append(f"reset ({cost}): {observed}")
        else:
            lines.append(f"{texts[min(turn, len(texts)) - 1]!r} ({cost}): {observed}")
    num_turns = len(played.answers) - 1
    if num_turns:
        steps = 1000 * np.array(played.seconds[1:])
        lines.append(
            f"a step takes {np.median(steps):.1f} ms (median), at most {steps.max():.1f} ms"
        )
    return lines


def reject_ids(request: Mapping[str, Any]) -> None:
    """Reject an agent that sends token ids, because there are only texts to reply with."""
    if request.get("ids") is not None:
        raise ConfigError(
            "the agent sends token ids (inference/v1/generate), which only a run can answer. Use "
            "an agent that calls chat/completions."
        )


def _shown(content: Any) -> str:
    return repr("".join(texts_of(content, "<image>")))


def reply_text(answer: dict[str, Any]) -> str:
    """Describe an environment's reply."""
    if "failed" in answer:
        return "failed"
    if "players" in answer:
        return "; ".join(
            f"{name}: {reply_text(reply)}" for name, reply in answer["players"].items()
        )
    if "text" in answer:
        return "only the prompt" if answer["text"] is None else _shown(answer["text"])
    reward = f"reward {answer['reward']:g}"
    if answer.get("end"):
        return f"{'cut' if answer.get('truncated') else 'end'}, {reward}"
    return ", ".join([*(_shown(message["content"]) for message in answer["messages"]), reward])


def _above_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def json_object(text: str) -> dict[str, Any]:
    """Parse an option that is a JSON object."""
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object, such as '{{\"level\": 3}}'")
    return value
